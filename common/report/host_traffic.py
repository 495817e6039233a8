"""What leaves the hosts of a run, from what its workers handed to the network: the rest stayed inside."""

from common.report.runs import FinishedRun, RunError
from common.topology import Transport, build, bytes_sent, transport_of
from common.topology.cost import bytes_leaving_hosts

WIDTH = {"bfloat16": 0.5, "float16": 0.5, "int8": 0.25}  # of messages, in terms of fp32


def leaving_share(run: FinishedRun) -> float:
    """Return the bytes that leave a host in terms of those that a worker hands to the network, in the mean.

    An all-reduce is a ring in the order of workers: every worker sends the same, and one of each host to another host.
    Raises RunError for a run whose configuration does not say on which hosts its workers were.
    """
    try:
        workers, parallel, options = (run.config[key] for key in ("workers", "parallel", "topology"))
        n, per_host, width = workers["count"], workers["per_host"], WIDTH.get(parallel.get("message_dtype"), 1.0)
        hosts = n // per_host
        if parallel["method"] == "allreduce":
            return float(hosts > 1)
        rounds = build(options["name"], n, per_host, **{k: v for k, v in options.items() if k != "name"}).sample
    except (KeyError, TypeError, ValueError, OSError, AttributeError) as error:
        raise RunError(f"{run.folder}: config.yaml: what leaves a host is not known ({error!r})") from None
    # decent-dp always all-reduces in groups.
    peer = (run.environment.get("emulated") or {}).get("engine") == "decent_dp"
    leaving = handed = 0.0
    for round_ in rounds:
        kind = Transport.SUBGROUP if peer else transport_of(round_, per_host)
        payload = 1.0 if kind is Transport.HIERARCHICAL else width  # inside hosts messages are whole
        leaving += sum(bytes_leaving_hosts(round_, per_host, width, kind).values()) / hosts
        handed += sum(bytes_sent(round_, i, payload, kind, per_host, width / per_host) for i in range(n)) / n
    return leaving / handed if handed else 0.0
