"""`serving slices`: lets be tried again what failed to start, a slice that is left out for it or a roll that stopped for it."""

import argparse
from typing import TYPE_CHECKING, Any

from serving.cli.status import add_address, address_of

if TYPE_CHECKING:
    from serving.state.gcs import Store


def add_commands(commands: Any) -> None:
    slices = commands.add_parser(
        "slices", help="slices that are left out, and rolls that stopped, because engines failed"
    )
    actions = slices.add_subparsers(required=True, metavar="COMMAND")
    release = actions.add_parser("release", help="let a slice out of quarantine: it is tried again at once")
    release.add_argument("slice", help="name of the slice, as `serving status` has it")
    add_address(release)
    release.set_defaults(run=_release)
    retry = actions.add_parser(
        "retry", help="try a roll that stopped again, once the cause of its failed starts is mended"
    )
    retry.add_argument("model", nargs="?", help="of this model alone")
    retry.add_argument("--application", help="of this application alone")
    add_address(retry)
    retry.set_defaults(run=_retry)


def _release(options: argparse.Namespace) -> None:
    from serving.errors import UnknownSliceError
    from serving.state.gcs import Store

    store = Store(address_of(options))
    known = store.read().slice_failures
    released = [failed for failed in known if failed.slice == options.slice]
    if not released:
        names = sorted({failed.slice for failed in known})
        raise UnknownSliceError(
            f"no failure is known of slice {options.slice!r}; "
            + (f"failures are known of {', '.join(names)}" if names else "none is known of any slice")
        )
    for failed in released:
        store.delete_slice_failures(failed)
        print(
            f"{failed.slice}: released; {failed.failures} failures on {failed.host}, the last one: {failed.reason}"
        )


def _retry(options: argparse.Namespace) -> None:
    from serving.state.gcs import Store

    for line in retry(Store(address_of(options)), options.model, options.application):
        print(line)


def retry(store: "Store", model: str | None, application: str | None = None) -> list[str]:
    """Ask that rolls that stopped, of one model or application or of all, are tried again; what to print of each."""
    from serving.errors import UnknownSliceError

    stopped = [roll for roll in store.read(application).rollouts if roll.stopped]
    chosen = [roll for roll in stopped if model in (None, roll.model)]
    if not chosen:
        models = ", ".join(sorted({roll.model for roll in stopped}))
        raise UnknownSliceError(
            f"no roll of {model or 'any model'}{f' of {application}' if application else ''} has stopped"
            + (f"; one of {models} has" if models else "")
        )
    for roll in chosen:
        store.put_retry(roll)
    return [
        f"{roll.model} ({roll.application}) on {roll.pool}: tried again; {roll.failed} starts failed, the last one: {roll.reason}"
        for roll in chosen
    ]
