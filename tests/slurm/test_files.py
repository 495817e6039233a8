"""What can be said of jobs without a Slurm: files of tables and clusters, allocations, commands."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest

from common.cli import UsageError
from common.experiments.definitions import ROOT, names_in
from common.experiments.table_file import TABLES
from common.experiments.tables import load_table
from slurm.allocation import NOT_FOR_SRUN, Allocation, JobError
from slurm.job import cell, check_count, main
from slurm.options import CLUSTERS, SbatchOptions
from slurm.starts import read
from tests.slurm.fakes import VARIABLES, attempt
from tests.waiting import LIMIT_S

BENCHMARK_FILES = ("table1", "figure6")


def test_the_readme_has_every_table_for_a_cluster() -> None:
    text = (ROOT / "slurm" / "README.md").read_text()
    parts = re.findall(r"^\| `sbatch slurm/table.sbatch (\w+)` .* `rows=(\S+) seeds=(\S+)` \|$", text, re.MULTILINE)
    assert {name for name, _, _ in parts} == {name for name in names_in(TABLES) if load_table(name).cluster is not None}
    for name, rows, seeds in parts:
        known = {cell.row.name for cell in load_table(name).cells(Path("runs"))}
        assert {row.split("/")[0] for row in rows.split(",")} <= known
        assert set(map(int, seeds.split(","))) <= set(load_table(name).seeds)


def test_the_job_that_submits_a_table_asks_for_its_name() -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(ROOT)}
    done = subprocess.run(["bash", ROOT / "slurm" / "table.sbatch"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: which table? for instance: sbatch slurm/table.sbatch table3\n")


@pytest.mark.parametrize("name", BENCHMARK_FILES)
def test_a_benchmarks_file_runs_it_on_all_ranks(name: str, program, tmp_path: Path) -> None:
    """Its arguments are known to the benchmark, and the user's take precedence."""
    program("srun", '#!/bin/sh\nprintf "%s\\n" "$@" >"$CALLS"; exit 3', raw=True)
    file = ROOT / "slurm" / f"{name}.sbatch"
    environment = os.environ | VARIABLES | {"VENV": "", "SLURM_SUBMIT_DIR": str(ROOT), "CALLS": f"{tmp_path}/calls"}
    environment["PATH"] = f"{tmp_path}/bin:{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", str(file), "output=mine"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 3, done.stderr
    arguments = (tmp_path / "calls").read_text().splitlines()
    module, *keys = arguments[arguments.index("slurm.rank") + 1 :]
    assert import_module(module).read(keys).output == "mine"


@pytest.mark.parametrize(
    ("name", "more", "ranks", "nodes"),
    [("t4_4x8", None, 32, 4), ("one_node_cpu", "--ntasks-per-node=2", 6, 3),
     ("a40_4x4", "--gpus-per-node=a40:8", 32, 4), ("t4_4x8", "--gres gpu:t4", 2, 2),
     (str(CLUSTERS / "a40_4x4"), "--gres=nvme:1,gpu:2", 32, 16)],
)  # fmt: skip
def test_nodes_follow_from_the_ranks(name: str, more: str | None, ranks: int, nodes: int) -> None:
    options = SbatchOptions.load(name, more).for_ranks(ranks)
    assert [option for option in options if option.startswith("--nodes")] == [f"--nodes={nodes}"]
    assert len([option for option in options if "gpu" in option and "per-gpu" not in option]) <= 1
    assert ("--gres=nvme:1" in options) == ("nvme" in (more or ""))


@pytest.mark.parametrize(
    ("cluster", "more", "message"),
    [
        ("h100", None, "cluster=h100: expected a file of yours, or one of slurm/clusters: a100_16x8"),
        ("a100_4x4", None, "6 ranks on nodes of 4"),
        ("a100_4x4", "--gpus-per-node=a40", "ranks of a node: a40 "),
        ("a100_4x4", "--gpus-per-node=0 --ntasks-per-node=5", "6 ranks on nodes of 5"),
        ("a100_4x4", "-G 8", "expected --gpus-per-node"),
        ("a100_4x4", "--gpus=8", "expected --gpus-per-node"),
        ("a100_4x4", "--gpus-per-task=1", "expected --gpus-per-node"),
        (b"\xff", None, "expected a text file of sbatch's options"),
        (b"root:x:0", None, "root:x:0: expected options of sbatch, which begin with -"),
        (b"--nodes=1", "hello", "sbatch=hello: hello: expected options of sbatch"),
        (b"--nodes=1", '--time="1', 'sbatch=--time="1: expected words as in a shell'),
        (b"--nodes=1", "--nodes", "cluster, sbatch: argument -N/--nodes: expected one argument"),
    ],
)
def test_options_that_do_not_fit_are_refused(cluster: str | bytes, more: str | None, message: str, tmp_path) -> None:
    """cluster: a name, or the content of a file of the user."""
    if isinstance(cluster, bytes):
        (tmp_path / "mine").write_bytes(cluster)
    with pytest.raises(UsageError, match=re.escape(message)):
        SbatchOptions.load(cluster if isinstance(cluster, str) else str(tmp_path / "mine"), more).for_ranks(6)


def test_the_allocation_is_read_from_slurms_variables() -> None:
    alike = {"gpus_per_node": 0, "ranks_per_node": 2, "cpus_per_node": 32}
    assert Allocation.read(VARIABLES) == Allocation("7", 4, "node[1-4]", "node1", **alike)
    assert Allocation.read(VARIABLES | {"SLURM_GPUS_ON_NODE": "8"}).ranks_per_node == 8
    unasked = {name: value for name, value in VARIABLES.items() if name != "SLURM_NTASKS"}
    assert Allocation.read(unasked).ranks_per_node == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, r"2\(x3\),1; expected equal nodes"),
        ({"SLURM_GPUS": "a40:6", "SLURM_GPUS_ON_NODE": "2"}, "--gpus=6 on 4 nodes, 2 on the first: expected equal"),
        ({"SLURM_JOB_ID": "12+1"}, "heterogeneous"),
        ({"SLURMD_NODENAME": None}, "not inside a Slurm job"),
        (dict.fromkeys(VARIABLES), "not inside a Slurm job"),
        ({"SRUN_OPTIONS": '"'}, "SRUN_OPTIONS"),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused(changes: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in (VARIABLES | changes).items() if value is not None}
    with pytest.raises(JobError, match=message) as caught:
        Allocation.read(variables)
    assert caught.value.code == 2


@pytest.fixture
def job(tmp_path: Path, program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs a job to its end, with this program as srun; its log is tmp_path/log."""
    monkeypatch.setattr("slurm.job.signal.signal", lambda *_: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program("scontrol", "", fails=True)

    def run(overrides: list[str], srun: str = "#!/bin/sh\n", **options: int | None) -> int:
        program("srun", srun, raw=True)
        with (tmp_path / "log").open("ab", buffering=0) as log:
            return attempt("gpt2", overrides, tmp_path, log, **options).run()

    return run


@pytest.mark.parametrize(
    ("overrides", "omp", "expected"),
    [
        (["seed=2"], "", ["seed=2", "training.threads=16", "resume=true"]),
        (["seed=2"], "4", ["seed=2", "training.threads=4", "resume=true"]),
        (["resume=false", "training.threads=3"], "", ["resume=false", "training.threads=3"]),
    ],
)
def test_a_job_shares_out_cpus_and_resumes(job, tmp_path: Path, monkeypatch, overrides, omp, expected) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    job(overrides)
    assert shlex.join(["slurm.rank", "gpt2.train", *expected]) + "\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("count", "per_worker", "expected"), [(None, 1, 8), (6, 1, 6), (None, 2, 4)])
def test_an_elastic_job_runs_an_agent_on_each_node(job, tmp_path: Path, count, per_worker: int, expected: int) -> None:
    """Two ranks on each of four nodes; nodes that the workers leave over stand by."""
    job([], min_workers=3, count=count, per_worker=per_worker)
    (command,) = re.findall(r"^\[slurm\] (srun .*)$", (tmp_path / "log").read_text(), re.MULTILINE)
    before, after = command.split(" slurm/node.sh ")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(before.split())
    threads = "training.threads=16 resume=true"
    assert after == f"--elastic gpt2.train {threads} workers.count={expected} workers.per_host={2 // per_worker}"


@pytest.mark.parametrize(
    ("status", "code", "min_workers", "end", "exit_code"),
    [
        ("finished", 0, 3, "finished", 0),
        ("finished", 1, 3, "finished", 0),  # a node crashed, the others finished the run
        ("finished", 1, None, "failed", 1),
        ("interrupted", 0, 3, "saved", 75),  # too few nodes were left
        ("running", 1, 3, "failed", 1),
    ],
)
def test_how_an_elastic_job_ends(job, tmp_path: Path, status, code, min_workers, end, exit_code) -> None:
    """Lost nodes are no failure as long as the others saved or finished the run."""
    summary = json.dumps({"status": status})
    steps = f"echo '{summary}' >{tmp_path}/summary.json; exit {code}"
    srun = f'#!/bin/sh\ncase "$*" in *--overlap*) exit;; esac\n{steps}\n'
    assert job([], srun, min_workers=min_workers) == exit_code
    assert read(tmp_path)[-1].end == end


def test_a_job_that_gets_nowhere_stops_and_says_so(job, tmp_path: Path) -> None:
    """Slurm requeues it, as after the failure of a node."""
    srun = '#!/bin/sh\ncase "$*" in *--overlap*) exit;; esac\nexit 3\n'
    assert [job([], srun) for _ in range(3)] == [1, 1, 1]
    assert (tmp_path / "log").read_text().count("job 7 began 2 times at step 0 and got no further: it stops") == 1
    assert [start.end for start in read(tmp_path)] == ["failed", "failed"]


def test_a_summary_of_an_earlier_start_says_nothing_of_this_one(tmp_path: Path) -> None:
    for status in ("interrupted", "finished"):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        with (tmp_path / "log").open("ab", buffering=0) as log:
            start = attempt("gpt2", [], tmp_path, log, min_workers=3)
        assert start._end(1) == "failed"
        (tmp_path / "summary.json").write_text(json.dumps({"status": status, "steps": 1}))
        assert start._end(1) == {"interrupted": "saved", "finished": "finished"}[status]


@pytest.mark.parametrize("file", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda file: file.stem)
def test_a_job_of_another_folder_says_what_is_expected(file: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", file], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"submitted from {tmp_path}; expected the repository's root" in done.stderr


@pytest.mark.parametrize(
    ("count", "per_worker", "told"), [(8, 1, ""), (None, 1, ""), (4, 2, ""), (6, 1, "6"), (8, 2, "8")]
)
def test_workers_that_do_not_fit_the_nodes_are_named_once(count: int | None, per_worker: int, told: str) -> None:
    workers = {"kind": "processes", "count": count}
    config = {"workers": workers, "elastic": {"min_workers": None}, "parallel": {"ranks_per_worker": per_worker}}
    if not told:
        check_count(config, Allocation.read(VARIABLES))
        return
    with pytest.raises(JobError, match=f"workers.count={told}: the launcher started 8 processes"):
        check_count(config, Allocation.read(VARIABLES))


def test_srun_is_told_what_the_job_was_not_asked_for(monkeypatch: pytest.MonkeyPatch, program) -> None:
    """And slurm/node.sh the nodes' addresses, as a container cannot ask Slurm."""
    for name in NOT_FOR_SRUN:
        monkeypatch.setenv(name, "1")
    nodes = [f"NodeName=node{k} Arch=x86_64 CPUTot=4 NodeAddr=10.0.0.{k} NodeHostName=node{k}" for k in (1, 2)]
    program("scontrol", "\n".join(nodes))
    environment = Allocation.read(VARIABLES).environment()
    assert not set(NOT_FOR_SRUN) & set(environment)
    assert environment["NODE_ADDRESSES"] == "node1=10.0.0.1 node2=10.0.0.2"
    assert environment["RENDEZVOUS_PORT"] == "20007"
    monkeypatch.setenv("RENDEZVOUS_PORT", "29500")
    assert Allocation.read(VARIABLES).environment()["RENDEZVOUS_PORT"] == "29500"


def test_what_the_user_adds_takes_precedence_and_the_report_runs_where_the_runs_do() -> None:
    cluster = SbatchOptions.load("t4_4x8", "-p gpu --account=physics --gpus-per-node 4 --exclusive")
    assert cluster.for_ranks(32) == (
        "--gpus-per-node=4", "--account=physics", "--partition=gpu",
        "--cpus-per-gpu=16", "--mem-per-gpu=64G", "--exclusive", "--nodes=8",
    )  # fmt: skip
    assert cluster.for_report("-p cpu") == ("--account=physics", "--partition=gpu", "-p", "cpu")


def test_a_jobs_account_and_partition_hold_for_the_jobs_that_it_submits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION"):
        monkeypatch.setenv(f"SLURM_JOB_{name}", f"my_{name.lower()}")
    inherited = ("--account=my_account", "--partition=my_partition", "--qos=my_qos", "--reservation=my_reservation")
    assert SbatchOptions.load("a40_4x4").for_report(None) == inherited
    assert set(inherited) < set(SbatchOptions.load("a40_4x4").for_ranks(4))
    (tmp_path / "mine").write_text("--partition=gpu\n--qos=long\n")
    chosen = SbatchOptions.load(str(tmp_path / "mine"), "-q short").for_report(None)
    assert chosen == ("--account=my_account", "--partition=gpu", "--qos=short", "--reservation=my_reservation")


def test_an_array_element_takes_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text('["cnn", "seed=1"]\n["gpt2", "name=a b"]\n')
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert cell(str(file)) == ["gpt2", "name=a b"]


@pytest.mark.parametrize("argv", [[], ["resnet"], ["seed=1"]])
def test_an_unknown_task_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "expected cnn, transformer or gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("node", "route", "hosts", "address", "interface"),
    [
        ("node1", 'echo "$4 via 10.0.0.9 dev eth-$4 src 10.0.0.1"', 1, "127.0.1.1", "eth-10.0.0.2"),
        ("node2", 'echo "$4 dev eth-$4 src 10.0.0.2 uid 0"', 0, "10.0.0.2", "eth-127.0.1.1"),
        ("node3", "exit 127", 0, "node3", ""),  # an image without ip
    ],
)
def test_nodes_meet_at_the_first(
    program, monkeypatch: pytest.MonkeyPatch, node, route, hosts, address, interface
) -> None:
    """It may know its own name as a loopback address."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    known = {"FIRST_NODE": "node1", "NODE_ADDRESSES": "node1=127.0.1.1 node2=10.0.0.2", "RENDEZVOUS_PORT": "20007"}
    for name, value in (known | {"SLURMD_NODENAME": node}).items():
        monkeypatch.setenv(name, value)
    program("ip", f"#!/bin/sh\n{route}\n", raw=True)
    program("python", '#!/bin/sh\necho "[$GLOO_SOCKET_IFNAME] [$NCCL_SOCKET_IFNAME] $*"; exit 3\n', raw=True)
    done = subprocess.run([ROOT / "slurm" / "node.sh", "--nnodes=3"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 3
    assert done.stdout == (
        f"[{interface}] [{interface}] -m torch.distributed.run --rdzv-endpoint=127.0.1.1:20007 "
        f"--rdzv-conf=is_host={hosts},read_timeout=600 --local-addr={address} --nnodes=3\n"
    )


def test_what_a_cluster_needs_may_use_variables_that_are_not_set(tmp_path: Path) -> None:
    """As the hooks of conda do; a virtual environment that is not there is named."""
    (tmp_path / "slurm").mkdir()
    shutil.copy(ROOT / "slurm" / "environment.sh", tmp_path / "slurm")
    (tmp_path / "slurm" / "site.sh").write_text('[ -n "$NOT_SET" ]\nVENV=$TRIED\n')
    script = ["bash", "-c", "set -euo pipefail; . slurm/environment.sh; echo goes on; $NOT_SET"]
    for venv, code, out, error in (
        ("", 1, "goes on\n", "unbound variable"),
        ("/no", 2, "", "VENV=/no: no environment"),
    ):
        environment = {"PATH": os.environ["PATH"], "TRIED": venv}
        done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stdout) == (code, out)
        assert error in done.stderr


@pytest.mark.parametrize(
    ("count", "per_worker", "saved", "told"),
    [
        (32, 1, False, "workers.count=32: expected at most 8, what 4 nodes of 2 ranks hold"),
        (5, 2, False, "workers.count=5: expected at most 4,"),
        (4, 3, False, "parallel.ranks_per_worker=3: expected a divisor of the 2 ranks of a node"),
        (32, 1, True, ""),
        (None, 2, False, ""),
    ],
)
def test_an_elastic_job_whose_nodes_cannot_hold_its_workers_does_not_wait(count, per_worker, saved, told, tmp_path):
    """But of a run that continues, fewer workers may be left."""
    manifest = tmp_path / "checkpoints" / "step_00000010" / "manifest.json"
    if saved:
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    config = {"workers": {"kind": "processes", "count": count}, "elastic": True, "run_dir": str(tmp_path)}
    config["parallel"] = {"ranks_per_worker": per_worker}
    with pytest.raises(JobError, match=told) if told else nullcontext():
        check_count(config, Allocation.read(VARIABLES))


def test_a_job_says_what_is_wrong_with_its_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in (VARIABLES | {"SLURM_JOB_NUM_NODES": "1"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "file").touch()
    assert main(["cnn", "experiment=quickstart", "workers.count=2", f"run_dir={tmp_path}/file/run"]) == 2
    assert capsys.readouterr().err == f"error: run_dir={tmp_path}/file/run: cannot be written (Not a directory)\n"
    assert main(["cnn", "--cfg", "job"]) == 2
    assert capsys.readouterr().err == "error: --cfg: expected overrides; flags are for python -m cnn.train\n"
    assert main(["cnn", "run_dir=null"]) == 2
    assert capsys.readouterr().err.startswith("error: a value is missing or of another type: ")


def test_the_report_draws_the_table_that_it_builds(program, tmp_path: Path) -> None:
    program("python", '#!/bin/sh\necho "$*"\n', raw=True)
    environment = os.environ | {"VENV": "", "SLURM_SUBMIT_DIR": str(ROOT)}
    for table, figure in (("2", "table2"), ("table2", "table2"), ("quickstart", "quickstart")):
        command = ["bash", ROOT / "slurm" / "report.sbatch", f"table={table}", "runs=my runs"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert f"-m scripts.figures figure={figure} runs=my runs\n" in done.stdout


@pytest.mark.parametrize(("content", "number"), [(None, "0"), ('["cnn"]', ""), ('["cnn"]', "1"), ("[]", "0")])
def test_an_element_that_its_file_lacks_is_named(content, number: str, tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "cells"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
    assert main(["--cells", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --cells {file}, SLURM_ARRAY_TASK_ID={number}: ")
