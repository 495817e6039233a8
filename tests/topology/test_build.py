"""Bad input to build() is refused by name; topologies and rounds are values."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.topology import NAMES, Round, Topology, build
from tests.naming import case
from tests.topology.cases import FAMILIES, cached

ROOT = Path(__file__).parents[2]


def test_names_in_order():
    assert " ".join(NAMES) == (
        "complete ring one_peer_ring static_exponential one_peer_exponential hypercube aer torus grid star "
        "random_matching base_k file"
    )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("rign", 4), {}, r"expected one of complete, ring, .*; got 'rign'; did you mean 'ring'\?"),
        (("exponential", 4), {}, r"got 'exponential'; did you mean '(one_peer|static)_exponential'\?"),
        ((["ring"], 4), {}, r"topology: expected one of .*; got \['ring'\]"),
        ((None, 4), {}, r"topology: expected one of .*; got None"),
        (("ring", 0), {}, r"topology 'ring': world_size: expected an integer >= 1, got 0"),
        (("ring", 4.0), {}, r"world_size: expected an integer >= 1, got 4\.0"),
        (("ring", True), {}, r"world_size: expected an integer >= 1, got True"),
        (("ring", "4"), {}, r"world_size: expected an integer >= 1, got '4'"),
        (("ring", 4, 0), {}, r"workers_per_host: expected an integer >= 1, got 0"),
        (
            ("ring", 4),
            {"seed": 1},
            r"topology 'ring': options: expected names among idle_rounds, between_hosts; got 'seed'",
        ),
        (("base_k", 4), {"K": 1}, r"expected names among k, idle_rounds, between_hosts; got 'K'"),
        (("torus", 4), {"row": 1}, r"among rows, cols, idle_rounds, between_hosts; got 'row'; did you mean 'rows'\?"),
        (("ring", 4), {"idle_rounds": -1}, r"idle_rounds: expected an integer >= 0, got -1"),
        (("base_k", 4), {"k": 0}, r"topology 'base_k': k: expected an integer >= 1, got 0"),
        (("random_matching", 4), {"seed": "x"}, r"seed: expected an integer >= 0, got 'x'"),
        (("torus", 6), {"rows": 4}, r"topology 'torus': rows: expected a divisor of world_size=6, got 4"),
        (("torus", 6), {"cols": 0}, r"cols: expected an integer >= 1, got 0"),
        (("torus", 12), {"rows": 2, "cols": 3}, r"rows \* cols: expected world_size=12, got 2 \* 3 = 6"),
        (("grid", 6), {"rows": 4}, r"topology 'grid': rows: expected a divisor of world_size=6, got 4"),
        (("hypercube", 6), {}, r"expected a power of two, got 6; for other sizes use base_k"),
        (("aer", 8, 3), {}, r"workers_per_host: expected a divisor of world_size=8, got 3"),
    ],
)
def test_bad_input_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments, **options)


def test_numpy_integers_are_integers():
    assert build("base_k", np.int64(6), k=np.int32(2)) == build("base_k", 6, k=2)


def test_options_show_the_defaults():
    assert build("base_k", 4).options == {"k": 1}
    assert build("torus", 4).options == {}
    assert build("torus", 4, rows=2, idle_rounds=1).options == {"rows": 2, "idle_rounds": 1}


@pytest.mark.parametrize("t", [-1, 0.5, None])
def test_rounds_count_from_zero(t):
    with pytest.raises(ValueError, match="expected an integer >= 0"):
        cached("ring", 4).round(t)


@pytest.mark.parametrize("name", FAMILIES)
def test_topologies_are_values(name):
    for n in (1, 2, 8):
        with case(name, n):
            topology, again = build(name, n), build(name, n)
            for twin in (again, copy.deepcopy(topology), pickle.loads(pickle.dumps(topology))):
                assert twin == topology
                assert hash(twin) == hash(topology)
                assert twin.fingerprint() == topology.fingerprint()
                assert all(twin.round(t) == topology.round(t) for t in range(5))
            with pytest.raises(AttributeError):
                topology.name = "other"
            with pytest.raises(TypeError):
                topology.round(0).weights[0][0] = 2.0


def test_fingerprints_differ_between_schedules():
    built = [build(name, 8) for name in NAMES if name != "file"]
    built += [build("random_matching", 8, seed=seed) for seed in (1, 2)]
    built += [build("base_k", 8, k=2), build("torus", 8, rows=1), build("aer", 8, 2), build("ring", 9)]
    built += [build("ring", 8, idle_rounds=1), build("ring", 8, workers_per_host=2)]
    assert len({topology.fingerprint() for topology in built}) == len(built)


def test_another_process_finds_the_same_fingerprint_without_torch_and_matplotlib():
    names = ["base_k", "random_matching", "static_exponential"]
    code = f"""
import sys
from common.topology import build
for name in {names}:
    print(build(name, 7).fingerprint())
print({{"torch", "matplotlib", "tabulate"}} & set(sys.modules))
"""
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.split() == [*(build(name, 7).fingerprint() for name in names), "set()"]


def test_fingerprint_ignores_rounding_noise_and_sees_differences():
    def fingerprint(weight):
        W = np.array([[1 - weight, weight], [weight, 1 - weight]])
        return Topology("mine", 2, schedule=(Round.from_matrix(W),)).fingerprint()

    assert fingerprint(0.3) == fingerprint(0.1 + 0.2)
    assert fingerprint(0.3) != fingerprint(0.3001)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((), "expected at least one row, got none"),
        (({0: 1.0}, {0: 0.5, 1: 0.5}), r"column 0 .*: expected a sum of 1, got 1\.5"),
        (({0: 2.0, 1: -1.0}, {0: -1.0, 1: 2.0}), r"row 0, worker 1: expected a weight >= 0, got -1\.0"),
        (({0: float("nan")},), r"row 0, worker 0: expected a weight >= 0, got nan"),
        (({0: 0.5, 2: 0.5}, {1: 1.0}), r"row 0: expected workers 0\.\.1, got 2"),
    ],
)
def test_bad_rounds_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Round(weights)


def test_other_bad_values_are_refused():
    with pytest.raises(ValueError, match="expected disjoint groups, got worker 1 twice"):
        Round.from_groups([(0, 1), (1, 2)], 3)
    with pytest.raises(ValueError, match=r"expected a square matrix, got shape \(2, 3\)"):
        Round.from_matrix(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="schedule: expected at least one round, got none"):
        Topology("mine", 2, schedule=())
    with pytest.raises(ValueError, match="schedule, round 0: expected 2 workers, got 3"):
        Topology("mine", 2, schedule=(Round.idle(3),))


def test_zero_weights_are_no_edges():
    round_ = Round(({0: 1.0, 1: 0.0}, {1: 1.0}))
    assert round_.is_idle
    assert round_ == Round.idle(2)
    assert Round.from_matrix(np.eye(2)) == round_
    assert not cached("ring", 4).round(0).is_idle
