"""Checks of the cluster as a whole: facts in, findings out."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from serving.doctor.deployed_check import manifest
from serving.doctor.facts import Deployed, Facts, HostFacts
from serving.doctor.findings import Check, Finding, failed, not_looked_at, not_yet, ok, warning
from serving.doctor.pods_check import nodes, pods
from serving.doctor.serve_check import serve
from serving.doctor.versions import locked
from serving.planning import Plan
from serving.slices.quarantine import FAILURES
from serving.slices.tpu_hosts import WEBHOOK, TpuHost, counted, is_of, lacks, listed, nameless
from serving.state.records import SliceState
from serving.tpu import POOL_LABEL, Slice, pool_label, serves_pool

_GUIDE = "docs/guides/gke.md"
_REFUSED = "InvalidAuthToken"  # as Ray says that a caller has not the cluster's token
_STRANGER = "give this command the cluster's token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; a head has it"
_HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_LOOKS_AFTER = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
_NOBODY = "start the cluster, or name another with --address or RAY_ADDRESS"


def ray_version(facts: Facts) -> list[Finding]:
    if facts.cut_short:
        return [
            failed(facts.cut_short, "see the head's logs and whether it runs, then type the command again")
        ]
    if isinstance(facts.cluster, str):
        deployed = facts.deployed
        if isinstance(deployed, Deployed) and deployed.service:
            on_the_head = f"kubectl exec -i HEAD -n {deployed.namespace} -c ray-head -- serving doctor /dev/stdin < FILE"
            return [
                not_looked_at(f"{facts.cluster}; the one in Kubernetes is asked on its head: {on_the_head}")
            ]
        return [failed(facts.cluster, _STRANGER if _REFUSED in facts.cluster else _NOBODY)]
    cluster, here = facts.cluster, facts.here
    wanted = locked(simulated=facts.simulated)["ray"]
    if cluster["ray"] != wanted:
        remedy = "build the image from the lock (lock/image.txt): placement of slices was tried with that Ray alone"
        return [failed(f"the head runs Ray {cluster['ray']}, and the lock has {wanted}", remedy)]
    if cluster != here:
        return [
            failed(
                f"the head runs Ray {cluster['ray']} on Python {cluster['python']}, this command Ray {here['ray']} on {here['python']}",
                "run the command with the image's Python, as on the head itself",
            )
        ]
    return [ok(f"Ray {cluster['ray']}, Python {cluster['python']}")]


def token(facts: Facts) -> list[Finding]:
    modes = {
        host.ip: host_facts.environment.get("RAY_AUTH_MODE", "disabled") for host, host_facts in facts.seen
    }
    if isinstance(facts.head, HostFacts):
        modes["the head"] = facts.head.environment.get("RAY_AUTH_MODE", "disabled")
    if not modes:
        return [_unseen(facts)]
    if len(set(modes.values())) > 1:
        without = [place for place, mode in modes.items() if mode != "token"]
        return [
            failed(f"Ray asks for a token, but not on {listed(without)}", "set RAY_AUTH_MODE=token on all")
        ]
    if set(modes.values()) != {"token"}:
        return [
            warning(
                "Ray asks nobody for a token: who reaches the head runs programs on every host",
                "set RAY_AUTH_MODE=token on all hosts (authOptions of KubeRay)",
            )
        ]
    return [ok(f"Ray asks for a token on {counted(len(modes), 'host')}")]


def cluster_secret(facts: Facts) -> list[Finding]:
    digests = {host.ip: host_facts.secret for host, host_facts in facts.seen}
    if isinstance(facts.head, HostFacts):
        digests["the head"] = facts.head.secret
    if not digests:
        return [_unseen(facts)]
    by_digest = Counter(digests.values())
    if len(by_digest) > 1:
        usual = by_digest.most_common(1)[0][0]
        other = [place for place, digest in digests.items() if digest != usual]
        return [
            failed(
                f"{listed(other)} and the others have different cluster secrets: routers can't ask those slices",
                "give all pods SERVING_CLUSTER_SECRET from one secret, and restart those that differ",
            )
        ]
    if not any(by_digest):
        return [
            warning(
                "no host has SERVING_CLUSTER_SECRET: slices' ports answer everybody",
                "make one with `serving secret`",
            )
        ]
    return [ok(f"one cluster secret on {counted(len(digests), 'host')}")]


def webhook(facts: Facts) -> list[Finding]:
    if isinstance(facts.hosts, str) or not facts.hosts:
        return [_unseen(facts)]
    if unnamed := nameless(facts.hosts):
        return [failed(unnamed, f"{WEBHOOK} ({_GUIDE})")]
    several = {name for name, hosts in facts.slices.items() if len(hosts) > 1}
    unset = [
        host.ip
        for host, host_facts in facts.seen
        if host.slice in several
        and not host_facts.simulated
        and "TPU_WORKER_HOSTNAMES" not in host_facts.environment
    ]
    if unset:
        return [
            failed(f"{counted(len(unset), 'host')} without TPU_WORKER_HOSTNAMES ({listed(unset)})", WEBHOOK)
        ]
    wrong = [
        f"{host.ip} has {counted(len(names), 'name')} in TPU_WORKER_HOSTNAMES, and slice {host.slice} has {counted(plan.slice.hosts, 'host')}"
        for host, host_facts in facts.seen
        if (names := host_facts.environment.get("TPU_WORKER_HOSTNAMES", "").split(",")) != [""]
        for plan in facts.plans_of(host)[:1]
        if len(names) != plan.slice.hosts
    ]
    if wrong:
        return [
            failed(listed(wrong), "see numOfHosts of the worker group: the webhook makes the names from it")
        ]
    if mixed := [name for name, lists in _hostnames(facts).items() if len(lists) > 1]:
        problem = f"hosts of slice {listed(mixed)} have different TPU_WORKER_HOSTNAMES: two slices have one TPU_NAME"
        return [failed(problem, "give every slice a TPU_NAME of its own, then restart Ray on these hosts")]
    return [ok(f"TPU_NAME and TPU_WORKER_ID on {counted(len(facts.hosts), 'host')}")]


def _hostnames(facts: Facts) -> dict[str, set[str]]:
    """The lists of names in TPU_WORKER_HOSTNAMES by slice: libtpu needs one and the same on all hosts."""
    lists: defaultdict[str, set[str]] = defaultdict(set)
    for host, host_facts in facts.seen:
        if host.named and (names := host_facts.environment.get("TPU_WORKER_HOSTNAMES")):
            lists[host.slice].add(names)
    return lists


def slices(facts: Facts) -> list[Finding]:
    """Whether every slice that has joined is whole, and of a shape of the plans."""
    if isinstance(facts.hosts, str):
        return [_unseen(facts)]
    findings, whole = [], 0
    for name, hosts in facts.slices.items():
        shapes = [
            plan.slice
            for plan in facts.plans
            if is_of(hosts, plan.slice) and serves_pool(hosts[0].pool, plan.pool)
        ]
        if not shapes:
            shape = f"{hosts[0].pod_type or 'unknown type'}, topology {hosts[0].topology or 'unknown'}"
            shape += f", bought for {hosts[0].pool}" if hosts[0].pool else ""
            findings.append(
                warning(
                    f"slice {name} ({shape}) is of no pool of the YAML: nothing will be placed there",
                    "change the YAML's slice, or the node pool",
                )
            )
            continue
        problems = [lacks(name, hosts, shape) for shape in dict.fromkeys(shapes)]
        if all(problems):
            remedy = "wait for the host, or see why its pod does not run: kubectl describe pod"
            findings.append(failed(problems[0], remedy))
        else:
            whole += 1
    if not findings and not whole:
        return [not_yet("no slice has joined")]
    return findings or [ok(f"{counted(whole, 'slice')} with all hosts")]


def pools(facts: Facts) -> list[Finding]:
    """Whether there are as many whole slices as the pools' minimum, and hosts of pools of one shape can be told apart."""
    if isinstance(facts.hosts, str):
        return [_unseen(facts)]
    wanted: defaultdict[Slice, defaultdict[str, list[Plan]]] = defaultdict(lambda: defaultdict(list))
    for plan in facts.plans:
        wanted[plan.slice][plan.pool].append(plan)
    findings = []
    for shape, of_shape in wanted.items():
        of_key = Counter(
            hosts[0].pool
            for name, hosts in facts.slices.items()
            if is_of(hosts, shape) and not lacks(name, hosts, shape)
        )
        unlabelled = of_key[""]
        for at, (key, plans) in enumerate(of_shape.items(), 1):
            least, most = (sum(getattr(plan.model.replicas, end) for plan in plans) for end in ("min", "max"))
            own = of_key[pool_label(key)]
            # Slices without a label serve every pool: each counts what it lacks, and the last what is left.
            shared = unlabelled if at == len(of_shape) else min(unlabelled, max(0, least - own))
            unlabelled -= shared
            findings.append(_count(shape, key if len(of_shape) > 1 else "", own + shared, least, most))
        findings += _indistinct(shape, list(of_shape), facts.hosts)
    return findings


def _count(shape: Slice, key: str, there: int, least: int, most: int) -> Finding:
    counts = f"{there} whole of {shape}{f' for {key}' if key else ''}, of {least} that the YAML starts with"
    counts += f" and {most} at most" if most > least else ""
    if there >= least:
        return ok(counts)
    remedy = "add nodes of that shape (`serving manifest` prints the gcloud line), or lower replicas.min"
    return failed(counts, remedy)


def _indistinct(shape: Slice, keys: Sequence[str], hosts: Sequence[TpuHost]) -> list[Finding]:
    """Hosts on which slices of several pools are placed, since no label says how they were bought."""
    ips = [host.ip for host in hosts if is_of([host], shape) and not host.pool]
    if len(keys) < 2 or not ips:
        return []
    problem = (
        f"{counted(len(ips), 'host')} of {shape} without the label {POOL_LABEL} ({listed(ips)}): "
        f"slices of {' and '.join(keys)} go on them, however they were bought"
    )
    remedy = f"apply the manifest and delete the RayCluster; a worker group of your own needs `labels: {{{POOL_LABEL}: {keys[0]}}}`"
    return [warning(problem, remedy)]


def control_store(facts: Facts) -> list[Finding]:
    if not isinstance(facts.head, HostFacts):
        return [not_looked_at(facts.head)]
    redis = facts.head.environment.get("RAY_REDIS_ADDRESS")
    if redis:
        return [ok(f"kept in the Redis at {redis.rpartition('@')[2]}: slices outlive the head")]
    if facts.head.environment.get("RAY_gcs_storage") == "rocksdb":
        return [ok("kept on the head's disk: slices outlive a restart of the head")]
    return [
        warning(
            "kept in the head's memory: when the head ends, every slice ends a minute later",
            "keep it outside: gke.control_store (docs/guides/failures.md)",
        )
    ]


def door(facts: Facts) -> list[Finding]:
    if not isinstance(facts.head, HostFacts):
        return [not_looked_at(facts.head)]
    findings = []
    if not facts.head.environment.get(_HAPROXY, "").endswith("serving-haproxy"):
        findings.append(
            warning(
                "HAProxy runs as Serve sets it up: silent sockets close the door for an hour, and engines work on for clients that hang up",
                f"set {_HAPROXY} in the head's environment, as the image does, to where `serving-haproxy` is",
            )
        )
    if _LOOKS_AFTER not in facts.head.environment:
        findings.append(
            warning(
                "Serve looks after HAProxy every 10 s: one that dies is back after half a minute",
                f"set {_LOOKS_AFTER}=1 in the head's environment, as the image does",
            )
        )
    return findings or [ok("HAProxy runs with this service's limits, and is started anew within seconds")]


def endpoints(facts: Facts) -> list[Finding]:
    if isinstance(facts.endpoints, str):
        return [not_looked_at(facts.endpoints)]
    findings = []
    for entry in facts.endpoints:
        if not entry.there:
            findings.append(not_yet(f"no Service {entry.service}"))
        elif not entry.ready:
            findings.append(
                failed(
                    f"Service {entry.service} has no ready address: clients reach nobody",
                    "see whether the head's pod is ready: kubectl get pods -l ray.io/node-type=head",
                )
            )
        elif strangers := sorted(set(entry.ready) - set(entry.heads)):
            findings.append(
                failed(
                    f"Service {entry.service} sends requests to {listed(strangers)}, where no door listens",
                    "use the Service that `serving manifest` renders, which selects the head alone",
                )
            )
        else:
            findings.append(ok(f"Service {entry.service} leads to the head ({listed(entry.ready)})"))
    return findings


def service(facts: Facts) -> list[Finding]:
    """What the slices of the running service do; other applications of the cluster are none of the YAML's."""
    if isinstance(facts.snapshot, str):
        return [not_looked_at(facts.snapshot)]
    wanted = {(record.application, record.model): record for record in facts.snapshot.wanted}
    if not wanted and not facts.snapshot.slices:
        return [not_yet("nothing is deployed: `serve run` the YAML")]
    findings = []
    for application, model in ((name, model) for name, models in facts.models.items() for model in models):
        owner = application, model
        records = [record for record in facts.snapshot.slices if (record.application, record.model) == owner]
        serving = sum(record.serves for record in records)
        name = f"{model} ({application})" if len(facts.models) > 1 else model
        if owner not in wanted:
            findings.append(not_yet(f"{name} is not deployed"))
            continue
        state = f"{name}: {serving} of {counted(wanted[owner].slices, 'slice')} serve"
        lost = [record for record in records if record.state is SliceState.LOST and record.reason]
        starting = [record for record in records if record.state is SliceState.STARTING]
        if serving >= wanted[owner].slices:
            findings.append(ok(state))
        elif why := wanted[owner].why:
            findings.append(
                failed(
                    f"{state}; waiting {wanted[owner].missing_for_s:.0f} s: {why}",
                    "see `webhook`, `slices` and `pools`",
                )
            )
        elif starting:
            phases = [f"{record.slice or 'no slice yet'} {record.phase}" for record in starting]
            findings.append(not_yet(f"{state}; starting: {listed(phases)}"))
        elif lost:
            findings.append(failed(f"{state}; {lost[0].slice}: {lost[0].reason}", "see `serving status`"))
        else:
            findings.append(failed(state, "see `serving status`, and Serve's log on the head"))
    findings += [
        failed(
            f"engines failed on slice {entry.slice} ({entry.host}) {entry.failures} times: {entry.reason}",
            f"mend the host, then `serving slices release {entry.slice}`",
        )
        for entry in facts.snapshot.slice_failures
        if entry.failures >= FAILURES
        or not entry.early  # one request may have ended a single engine that served
    ]
    return findings


def _unseen(facts: Facts) -> Finding:
    if isinstance(facts.hosts, str):
        return not_looked_at(facts.hosts)
    return not_yet("no TPU host has joined") if not facts.hosts else not_looked_at("no host answered")


CLUSTER: Sequence[Check] = (
    Check("ray", "Head, this command and the lock have one version of Ray and Python.", ray_version),
    Check("token", "Ray asks for a token on all hosts, or on none.", token),
    Check("secret", "Head and slices have one cluster secret.", cluster_secret),
    Check("webhook", "Every TPU host has what Google's TPU webhook sets.", webhook),
    Check("slices", "Every slice that has joined has all its hosts, with all their chips.", slices),
    Check("pools", "There are as many whole slices as `replicas.min` asks for.", pools),
    Check("control store", "Ray's control store outlives the head.", control_store),
    Check("door", "HAProxy on the head has this service's limits, and is looked after every second.", door),
    Check("pods", "The pods of head, slices and Redis run in Kubernetes, and why not.", pods),
    Check("nodes", "The pods of a slice are on nodes of one node pool.", nodes),
    Check("endpoints", "The Service in Kubernetes leads to the head, and nowhere else.", endpoints),
    Check("manifest", "RayService and RayCluster are what the YAML renders.", manifest),
    Check("serve", "Serve has taken the application as it was deployed last, and why not.", serve),
    Check("service", "As many slices serve as are wanted, and why not.", service),
)
