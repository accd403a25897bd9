"""Every wait between a missed sign of life and a lost slice, each with its reason. Data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """How long each part waits before it believes that another one is gone. All fields are seconds.

    The chain from a missed beat to a lost slice:

    1. A replica writes its record every `beat_s`. Routers, scaling and the status page read as often.
    2. A router asks a slice whose record has not moved for `silent_s` whether it is well, within `well_s`. An answer counts
       as a beat: a slow store or a head that restarts is no reason to leave a slice. Where nobody listens, or did not when
       the slice broke off a request, the slice is LOST at the next beat.
    3. A record that has not moved for `stale_s` is LOST to its reader: no new request goes to that slice, and what runs
       there goes on elsewhere.
    4. A record that has not moved for `forgotten_s` leaves the store. A router probes the replica within `probe_reach_s`
       and ends a replica that does not answer, so that Serve starts another one.
    5. The replica itself is quicker where it lives: a sentinel on each host dies with its connection, or leaves a ping
       unanswered for `host_silent_s`; the engine is probed every `engine_probe_s` and counts as hung after the YAML's
       `stall_s`; while it compiles a program, for at most `compile_s`, that clock and the routers' stand still. Either way
       the replica writes LOST, gives clients `last_words_s`, and ends.
    6. Serve sees that within `health_period_s` and places a new replica on a whole slice.
    """

    # state: what a replica or router says of itself
    beat_s: float = 0.5  # a put takes 0.2 ms; a router learns of a new slice within two beats
    silent_s: float = 1.0  # two beats: whoever is gone is LOST within 2 s. A question costs less than a token
    stale_s: float = 2.5  # five beats: an event loop that waits for a slow step still beats from its thread
    forgotten_s: float = 8.0  # as long as a host of a slice may be silent
    heard_s: float = 1.5  # by when every router has read what one wrote: two beats, a write and a read

    # slices: sentinels on the hosts
    host_ping_s: float = 1.0
    # A sentinel answers in milliseconds; on a host that compiles it may wait for a core.
    host_silent_s: float = 8.0
    # A sentinel may still be starting; 18 s were too few at a load of 40 on two cores.
    host_first_answer_s: float = 60.0
    host_notice_s: float = 1.0  # how often Ray is asked for hosts that are to go
    chips_free_s: float = 10.0  # before a start, for an engine that is just ending to let its chips go
    # How often the Serve controller looks whether waiting replicas may be placed elsewhere.
    quarantine_look_s: float = 2.0
    waiting_look_s: float = 3.0  # how often a router asks Ray for hosts while a slice is missing, to say why
    dead_actors_s: float = 1.0  # how often Ray is asked for dead actors while an engine starts

    # engine: the replica's own watch
    engine_probe_s: float = 2.0
    stacks_s: float = 1.5  # for the processes of a silent engine to write their stacks before they are killed
    compile_look_s: float = 0.25  # how often an engine's process looks whether it compiles; the silence of half a second asks for it
    compile_s: float = 900.0  # of one program; all programs of DeepSeek R1, one after the other, took 630 s
    last_words_s: float = 1.0  # for open requests to carry their error to the client before the process ends
    # How often a draining replica counts its open requests; the server has no event for it.
    open_requests_s: float = 0.2
    verdict_look_s: float = 2.0  # how often a slice looks whether a router found its tokens wrong
    # How often a slice that takes steps asks its workers what they compiled.
    late_programs_look_s: float = 2.0

    # How long a slice that goes over to TLS, or away from it, still answers on its former port.
    former_port_s: float = 60.0

    # app: what Serve is told
    health_period_s: float = 1.0  # Serve learns by it that a replica has ended
    health_timeout_s: float = 30.0
    # Beyond drain_s: a slice leaves the routers' tables within two beats, then engine and workers end.
    stop_margin_s: float = 20.0

    # router: one request and its slice
    connect_s: float = 3.0
    first_pause_s: float = 0.1  # before a failed request is tried again; doubles up to longest_pause_s
    longest_pause_s: float = 2.0
    look_again_s: float = 0.1  # while no slice takes a request
    stall_look_s: float = 0.5  # how often streams are looked at for a stall
    probe_reach_s: float = 3.0
    well_s: float = 1.0  # for a slice that broke off to say that it is well; its requests wait for that
    late_s: float = (
        10.0  # a slice that was found dead and serves on after so long was only late to say that it is well
    )
    circuit_open_s: float = 1.0  # two beats: by then a slice that is gone says so, or is seen to say nothing
    circuit_longest_s: float = 30.0
    # Python, the network or a busy host may pause as long without the engine's doing.
    shortest_stall_s: float = 2.0
    # Many prompts may have come at once, as those of another slice's broken streams do.
    shortest_prefill_stall_s: float = 10.0
    # The slice may compile the step first; an engine that hangs for so long gives itself up.
    unknown_stall_s: float = 30.0


TIMINGS = Timings()
