"""The names of the store's keys: APPLICATION/KIND/NAME. Pure.

One listing gives the records of one application alone. A replica's phase and the fixed part of its record, and a deployment's
release, have no application in their key: their names are unique in the cluster.
"""

from urllib.parse import quote, unquote

from serving.state.records import Demand, SliceFailures, SliceRecord

TIME = b"/time/"
# Kept by the name of a deployment, which begins with its application's.
_OF_DEPLOYMENTS = (b"/release/", b"/retry/")


def part(text: str) -> str:
    """A name as one part of a key: model names have slashes."""
    return quote(text, safe="")


def application_of(known: bytes) -> str:
    """The application that a key belongs to; empty of a slice's keys, which name none."""
    owner, _, name = known.split(b"/", 2)
    if known.startswith(_OF_DEPLOYMENTS):
        return unquote(name.decode()).rpartition("#")[0]
    return unquote(owner.decode())


def replica_of(known: bytes) -> bytes:
    """The replica, as its beat's key names it, of a key that names no application."""
    return known.split(b"/", 2)[2].partition(b"%2F")[0]


def key(application: str, kind: str, name: str) -> str:
    """The key of a record of an application; the application is empty where the name alone is unique in the cluster."""
    return f"{part(application)}/{kind}/{part(name)}"


def beat(record: SliceRecord) -> bytes:
    return key(record.application, "beat", record.replica).encode()


def fixed(replica: str) -> bytes:
    """Of no application in its key: a listing of an application's records leaves these out."""
    return f"/slice/{replica}".encode()


def demand(demand: Demand) -> str:
    return key(demand.application, "demand", f"{demand.router}/{demand.model}")


def phase(replica: str) -> str:
    return key("", "phase", replica)


def compiling(replica: str, worker: str) -> str:
    return key("", "compiling", f"{replica}/{worker}")


def slice_failures(failed: SliceFailures) -> str:
    return key(failed.application, "slice-failures", f"{failed.slice}/{failed.host}")


def verdict(replica: str) -> str:
    return key("", "verdict", replica)


def stop(replica: str) -> str:
    return key("", "stop", replica)


def start(replica: str) -> str:
    return key("", "start", replica)


def retry(deployment: str) -> str:
    return key("", "retry", deployment)


def refused_deploy(application: str) -> str:
    return key(application, "refused-deploy", application)


def release(deployment: str) -> str:
    return key("", "release", deployment)
