"""Which slices are left out of placement because engines failed there. Decisions only; time is given.

Two starts that failed on one host, with no start between them that served, put its slice into quarantine for a minute. A third
failure makes it two minutes, and so on up to an hour; then the slice is tried again. A slice that gave wrong tokens is left out
for an hour at once. A slice whose failing host was replaced is tried at once.

An engine that dies within EARLY_S of service counts as a start that failed, unless a request is found guilty of its death. A bad
chip ends one engine after the other, minutes after each has begun to serve.

Where no other slice serves the same version, the engine may be at fault. Then the slice is left out for that version alone, and
only while another slice is free to be tried. So a changed YAML is tried at once, and an engine that starts nowhere still fails
as often as Serve lets it. Of an engine that died early, only slices that have served for EARLY_S say that the host is at fault:
where all are young, requests that nobody found guilty may have ended them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from serving.state.records import SliceFailures, SliceRecord

FAILURES = 2
FIRST_S = 60.0
LONGEST_S = 3600.0
# Of service. A fault of a chip that shows more seldom costs little: its streams go on elsewhere, and a start takes a minute or two.
EARLY_S = 600.0
WRONG_TOKENS = 8  # failures that wrong tokens count for: the longest time at once, for a diagnosis
# Slices of an application and type that may be out for wrong tokens, beside the first. Slices that fall into two groups, as on
# hosts of two versions of libtpu, would take each other out until few are left: 38 of 50.
_MOST_WRONG = 0.2
# Of a slice that has not been tried since: it may be gone. On GKE a new one has the name of the one that it replaces.
FORGOTTEN_S = 24 * 3600.0
# Of one application, each on a host that may be gone: every router reads all of them at each beat.
MOST = 1000


def failed(
    own: SliceRecord,
    reason: str,
    now: float,
    known: Iterable[SliceFailures],
    entries: Iterable[SliceRecord],
    *,
    host_at_fault: bool = False,
    counts: int = 1,
    early: bool = False,
) -> SliceFailures:
    """The record of a failure now on `own`'s slice, which counts for so many starts that failed.

    `known` has the failures before, `entries` all slices there are. `early`: the engine died within EARLY_S of service.
    """
    host = blamed(reason, own.hosts)
    others = [entry for entry in entries if not early or now - entry.since >= EARLY_S]
    version = "" if host_at_fault or _serves_elsewhere(own, others) else own.version
    before = next(
        (
            record
            for record in known
            if (record.slice, record.host, record.application) == (own.slice, host, own.application)
        ),
        None,
    )
    if before and before.replica == own.replica:
        return before
    again = before is not None and before.version in ("", own.version)
    return SliceFailures(
        slice=own.slice,
        host=host,
        pod_type=own.pod_type,
        failures=(before.failures if before and again else 0) + counts,
        at=now,
        reason=reason,
        version=version,
        replica=own.replica,
        application=own.application,
        wrong=counts == WRONG_TOKENS,
        early=early or (before is not None and again and before.early),
    )


def explained(known: Iterable[SliceFailures], ended_by_requests: Collection[str]) -> list[SliceFailures]:
    """What becomes of the failures of engines that died early, where requests are guilty of it: one fewer each, or none.

    `ended_by_requests` has the replicas. A slice on which engines fail for another reason too keeps the rest.
    """
    return [
        replace(record, failures=record.failures - 1, replica="")
        for record in known
        if record.early and record.replica in ended_by_requests
    ]


def over(record: SliceFailures, own: SliceRecord, *, early: bool) -> bool:
    """Whether a failure is forgotten as `own` serves on its slice; one of an engine that died `early` only after EARLY_S."""
    same = record.slice == own.slice and record.version in ("", own.version)
    return same and record.early == early


def blamed(reason: str, hosts: Sequence[str]) -> str:
    """The host whose address the reason names; else worker 0, where EngineCore runs."""
    words = reason.replace("(", " ").replace(")", " ").replace(",", " ").replace(":", " ").split()
    return next((host for host in hosts if host in words), hosts[0])


def until(record: SliceFailures) -> float:
    """When the slice is tried again, seconds since 1970; 0 where it is not in quarantine."""
    if record.failures < FAILURES:
        return 0.0
    return record.at + min(LONGEST_S, FIRST_S * 2.0 ** (record.failures - FAILURES))


def quarantined(known: Iterable[SliceFailures], now: float) -> list[SliceFailures]:
    """Those in quarantine now, by slice and host."""
    return sorted(
        (record for record in known if until(record) > now), key=lambda record: (record.slice, record.host)
    )


def may_be_taken_out(
    own: SliceRecord, known: Iterable[SliceFailures], entries: Iterable[SliceRecord], now: float
) -> bool:
    """Whether a slice that was found to give wrong tokens goes: not where many have gone for that already."""
    out = {
        record.slice
        for record in quarantined(known, now)
        if record.wrong and (record.application, record.pod_type) == (own.application, own.pod_type)
    }
    serving = sum(entry.serves and entry.deployment == own.deployment for entry in entries)
    return len(out) < max(1, _MOST_WRONG * (serving + len(out)))


def of_hosts_there(known: Iterable[SliceFailures], hosts: Collection[tuple[str, str]]) -> list[SliceFailures]:
    """The failures on hosts that there are, of which `hosts` has slice and address."""
    return [record for record in known if (record.slice, record.host) in hosts]


def left_out(
    known: Iterable[SliceFailures], free: Iterable[str], pod_type: str, version: str, now: float
) -> frozenset[str]:
    """The slices that no engine of this version is to be placed on; `free` has those of this pod type without an engine."""
    records = [record for record in quarantined(known, now) if record.pod_type == pod_type]
    unfit = frozenset(record.slice for record in records if not record.version)
    suspected = frozenset(record.slice for record in records if record.version == version)
    others = set(free) - unfit - suspected
    return unfit | suspected if others else unfit


def forgotten(known: Iterable[SliceFailures], now: float) -> list[SliceFailures]:
    """Records that leave the store: the old, and beyond MOST the oldest."""
    newest = sorted(known, key=lambda record: record.at, reverse=True)
    return [*(record for record in newest[:MOST] if now - record.at > FORGOTTEN_S), *newest[MOST:]]


def _serves_elsewhere(own: SliceRecord, entries: Iterable[SliceRecord]) -> bool:
    return any(
        entry.serves and entry.version == own.version and entry.slice != own.slice for entry in entries
    )
