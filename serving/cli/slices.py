"""`serving slices`: lets a slice be tried again that is left out because engines failed to start there."""

import argparse
from typing import Any

from serving.cli.status import add_address, address_of


def add_commands(commands: Any) -> None:
    slices = commands.add_parser(
        "slices", help="slices that are left out because engines failed to start there"
    )
    actions = slices.add_subparsers(required=True, metavar="COMMAND")
    release = actions.add_parser("release", help="let a slice out of quarantine: it is tried again at once")
    release.add_argument("slice", help="name of the slice, as `serving status` has it")
    add_address(release)
    release.set_defaults(run=_release)


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
