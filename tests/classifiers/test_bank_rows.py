"""What the bank holds: rows added and evicted, new content, bad input, checkpoints, processes and threads."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import native
from classifiers.bank import Bank
from classifiers.faiss_library import AVX512
from classifiers.index import kept
from inputs import store
from tests.classifiers.reference import assert_exact, filled, rewritten
from utils import BadOption

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- rows in, rows out


def test_ids_are_given_or_assigned():
    bank = Bank(3)
    assert bank.add(torch.zeros(2, 3), [0, 1]).tolist() == [0, 1]
    assert bank.add(torch.zeros(2, 3), [0, 1], ids=[17, 5]).tolist() == [17, 5]
    assert bank.add(torch.zeros(1, 3), [0]).tolist() == [18]
    for ids in ([5], [3, 3]):
        with pytest.raises(BadOption, match="ids must be new"):
            bank.add(torch.zeros(len(ids), 3), [0] * len(ids), ids=ids)
    assert len(bank) == 5


def test_first_in_first_out_by_hand():
    bank = Bank(1, cap=3)
    for label, value in enumerate("abcde"):
        bank.add([[float(ord(value))]], [label])
        embedding, found_label, mask = bank.take(torch.tensor([label, label - 3]))  # the newest, and one that has just left
        assert (embedding[0].item(), found_label[0].item(), mask.tolist()) == (ord(value), label, [True, False])
    assert sorted(bank.ids.tolist()) == [2, 3, 4]
    found = bank.search([[float(ord("a"))]], 3)
    assert found.index.tolist() == [[2, 3, 4]]
    assert found.label.tolist() == [[2, 3, 4]]
    bank.add(torch.arange(7.0)[:, None], range(7), ids=range(10, 17))  # more than the cap at once
    assert sorted(bank.ids.tolist()) == [14, 15, 16]


def test_class_balanced_by_hand():
    """The largest class gives up its oldest row; a rare class is never driven out by a common one."""
    bank = Bank(1, cap=4, evict="class-balanced")
    for value, label in enumerate([0, 1, 1, 1]):
        bank.add([[float(value)]], [label])
    bank.add([[4.0]], [1])  # class 1 has four of five: its oldest, row 1, goes
    assert sorted(bank.ids.tolist()) == [0, 2, 3, 4]
    bank.add([[5.0]], [2])
    assert sorted(bank.ids.tolist()) == [0, 3, 4, 5]
    bank.add([[6.0]], [0])  # two each of 0 and 1, one of 2: the oldest row of the two large classes is row 0
    assert sorted(bank.ids.tolist()) == [3, 4, 5, 6]
    found = bank.search([[0.0]], 4)
    assert found.index.tolist() == [[3, 4, 5, 6]]
    assert found.label.tolist() == [[1, 1, 2, 0]]


@pytest.mark.parametrize("seed", range(10))
def test_class_balanced_against_one_at_a_time(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (37,), generator=generator).square() // 4
    births = torch.randperm(37, generator=generator)
    cap = int(torch.randint(1, 37, (), generator=generator))
    rows = list(range(37))
    while len(rows) > cap:
        sizes = [sum(labels[i] == labels[j] for i in rows) for j in rows]
        rows.remove(min((births[j].item(), j) for j, size in zip(rows, sizes, strict=True) if size == max(sizes))[1])
    assert kept(labels, births, cap, "class-balanced").nonzero()[:, 0].tolist() == rows
    assert kept(labels, births, cap, "fifo").nonzero()[:, 0].tolist() == sorted(births.argsort()[37 - cap :].tolist())


def test_growing_is_exact_all_along():
    generator = torch.Generator().manual_seed(2)
    bank = Bank(7, kind="flat", cap=150, evict="class-balanced")
    for step in range(9):
        rows = torch.randn(23, 7, generator=generator) + 100 * step  # ever farther from the origin
        bank.add(rows, torch.randint(3, (23,), generator=generator))
        assert_exact(bank, rows[:11], 5, bank.ids[:11])
    assert len(bank) == 150
    assert len(bank._rows) <= 150


@pytest.mark.parametrize("kind", ["flat", "ip"])
def test_lengths_follow_what_is_written(kind):
    """FAISS is told the squared lengths of the rows. Were they those of rows that were there before, short rows would look far away."""
    bank, queries = filled(101, 131, kind, cap=150)

    def check() -> None:
        found = assert_exact(bank, queries, 3)
        # Only for many numbers at once does FAISS use lengths.
        assert (bank.search(queries.repeat(47, 1), 3).index == found.index.repeat(47, 1)).all()

    rewritten(bank, 10 * bank.embeddings)
    check()
    bank.add(10 * queries, [0] * 23)
    bank.add(queries + 0.02, [0] * 23)
    check()
    rewritten(bank, 0.1 * bank.embeddings.flip(0))
    check()
    bank.add(queries + 0.01, [0] * 23)  # in the slots of rows that leave
    check()
    rewritten(bank, bank.embeddings + 7)
    check()
    queries += 7
    check()
    queries += 100
    bank.add(queries.repeat(13, 1) + torch.arange(299)[:, None] / 300, [0] * 299)
    check()


def test_inference_mode_leaves_no_trace():
    with torch.inference_mode():
        bank, queries = filled(101, 7)
        rewritten(bank, bank.embeddings * 2)
        found = bank.search(queries, 3)
    bank.add(queries, range(23))
    weight = torch.ones(7, requires_grad=True)
    (found.embedding * weight).sum().backward()
    (bank.search(queries, 3).embedding * weight).sum().backward()
    assert weight.grad is not None


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (lambda b, q: b.search(q, 12), "k must be from 1 to the number of rows in the bank (11), got 12"),
        (lambda b, q: b.search(q, 0), "k must be from 1 to the number of rows in the bank (11), got 0"),
        (lambda b, q: b.search(q[:, :5], 3), "queries must have the bank's dimension, (rows, 7), got (23, 5)"),
        (lambda b, q: b.search(q[0], 3), "queries must have the bank's dimension, (rows, 7), got (7,)"),
        (lambda b, q: b.search(q / 0, 3), "queries must hold neither NaN nor Inf; row 0 does not comply"),
        (lambda b, q: b.search(q.index_fill(0, torch.tensor([5]), torch.nan), 3), "neither NaN nor Inf; row 5 does not comply"),
        (lambda b, q: b.search(q * 1e30, 3), "queries must be shorter than 1e18; row 0 does not comply"),
        (lambda b, q: b.search(q, 3, exclude=torch.zeros(5, dtype=torch.long)), "exclude must be ids, (23,) or (23, M), got (5, 1)"),
        (lambda b, q: b.search(q, 3, exclude=torch.zeros(23)), "exclude must be ids"),
        (lambda b, q: b.add(q / 0, range(23)), "embeddings must hold neither NaN nor Inf"),
        (lambda b, q: b.add(q[:, :5], range(23)), "embeddings must have the bank's dimension, (rows, 7), got (23, 5)"),
        (lambda b, q: b.add(q, range(22)), "labels must be whole numbers, one for each of 23 rows"),
        (lambda b, q: b.add(q, torch.rand(23)), "labels must be whole numbers"),
        (lambda b, q: b.add(q, torch.full((23,), -1)), "labels must be at least 0, got -1"),
        (lambda b, q: b.require_classes(20), "bank must hold every class; it has no row of "),
        (lambda b, q: Bank(7, kind="hnws"), "auto, flat, ip, hnsw, ivf, ivfpq or a FAISS factory string (did you mean 'hnsw'?)"),
        (lambda b, q: Bank(7, kind="PQ5"), "index must be one of"),
        (lambda b, q: Bank(7, evict="fito"), "evict must be one of fifo, class-balanced (did you mean 'fifo'?), got 'fito'"),
        (lambda b, q: Bank(0), "embed_dim must be at least 1, got 0"),
        (lambda b, q: Bank(7, cap=0), "cap must be at least 1, got 0"),
        (lambda b, q: Bank(7).search(q, 1), "k must be from 1 to the number of rows in the bank (0), got 1"),
    ],
)
def test_refusals(act, line):
    bank, queries = filled(11, 7)
    before = bank.embeddings.clone()
    with pytest.raises(BadOption) as caught:
        act(bank, queries)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (bank.embeddings == before).all()


def test_an_index_that_cannot_be_trained():
    bank = Bank(7, kind="IVF64,Flat")
    bank.add(torch.randn(11, 7), range(11))
    with pytest.raises(BadOption, match="index cannot be built over 11 rows"):
        bank.search(torch.randn(2, 7), 3)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["flat", "ip", "hnsw", "ivf"])
def test_a_bank_comes_back_from_a_checkpoint(tmp_path, kind):
    bank, queries = filled(307, 7, kind, cap=400, evict="class-balanced")
    bank.add(queries + 3, range(23), ids=range(1000, 1023))
    wanted = bank.search(queries + 3, 5)
    rows, rest = bank.pack()
    store.save(tmp_path, {"bank": rows}, {"bank": rest})
    tensors, facts = store.load(tmp_path)
    again = Bank.unpack(tensors["bank"], facts["bank"])
    for mine, other in zip(vars(wanted).values(), vars(again.search(queries + 3, 5)).values(), strict=True):
        assert (mine == other).all()
    bank.add(queries * 2, [0] * 23)
    again.add(queries * 2, [0] * 23)
    assert bank.add(queries * 3 + 1, [1] * 23).tolist() == again.add(queries * 3 + 1, [1] * 23).tolist()
    assert sorted(bank.ids.tolist()) == sorted(again.ids.tolist())
    assert (bank.kind, bank.cap, bank.evict) == (again.kind, again.cap, again.evict)


def test_what_is_packed_keeps_its_names():
    """Checkpoints of earlier versions are read by them."""
    bank = Bank(1, cap=3)
    bank.add([[1.0], [2.0], [3.0], [4.0]], [0, 1, 0, 1], ids=[7, 5, 2, 3])
    rows, rest = bank.pack()
    assert {name: part.tolist() for name, part in rows.items()} == {
        "embedding": [[2.0], [3.0], [4.0]],
        "label": [1, 0, 1],
        "id": [5, 2, 3],
        "birth": [1, 2, 3],
    }
    shapes = {"embedding": [3, 1], "label": [3], "id": [3], "birth": [3]}
    assert rest == {"dim": 1, "kind": "auto", "recall": 0.99, "cap": 3, "evict": "fifo", "_next_id": 8, "_next_birth": 4, "shapes": shapes}
    bank.add([[5.0]], [0])
    assert rows["embedding"].tolist() == [[2.0], [3.0], [4.0]]  # a copy


def test_an_empty_bank_is_packed():
    bank = Bank.unpack(*Bank(7, cap=11).pack())
    assert (len(bank), bank.dim, bank.cap) == (0, 7, 11)
    bank.add(torch.randn(3, 7), range(3))
    assert bank.search(torch.randn(2, 7), 3).mask.all()


@pytest.mark.parametrize("name", ["embedding", "label", "id", "birth"])
def test_a_bank_that_is_not_whole_is_refused(name):
    rows, rest = filled(31, 7)[0].pack()
    for wrong in (rows | {name: rows[name][:-1]}, {k: v for k, v in rows.items() if k != name}, {}):
        with pytest.raises(BadOption, match=r"^bank must be whole: its rows are not those that it names$"):
            Bank.unpack(wrong, rest)


# ---------------------------------------------------------------- processes and threads


def test_copies_are_apart():
    bank, queries = filled(307, 7, "hnsw")
    wanted = bank.search(queries, 5)
    for other in (copy.deepcopy(bank), pickle.loads(pickle.dumps(bank))):
        assert (other.search(queries, 5).index == wanted.index).all()
        other.add(queries, range(23))
        assert (len(bank), len(other)) == (307, 330)


FORK = """
import os, sys, threading
import torch, faiss
faiss.omp_set_num_threads(2)
from classifiers.bank import Bank
bank = Bank(16, kind=sys.argv[1])
bank.add(torch.randn(3000, 16), torch.arange(3000) % 7)
queries = torch.randn(64, 16)
wanted = bank.search(queries, 5).index
held, done = threading.Event(), threading.Event()
def hold():
    with bank._lock:
        held.set()
        done.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(0 if (bank.search(queries, 5).index == wanted).all() else 3)
done.set()
assert os.waitpid(child, 0)[1] == 0
bank.search(queries, 5)
print("both alive", faiss.omp_get_max_threads())
bank.search(queries[:, :5], 5)  # without asserts FAISS would read out of bounds
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("kind", "flags"), [("flat", ["-O"]), ("hnsw", [])])
def test_search_in_a_forked_child(kind, flags):
    """After a search in the parent, and while another thread of it holds the lock: neither hangs. With and without asserts."""
    command = [sys.executable, "-W", "ignore", *flags, "-c", FORK, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["both", "alive", "2"], done.stderr
    assert "queries must have the bank's dimension, (rows, 16), got (64, 5)" in done.stderr


KERNELS = """
import ctypes, glob, json, os, sys
from classifiers import faiss_library
for flags, chosen in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork():  # what FAISS's OpenBLAS takes, it takes once in a process
        assert os.wait()[1] == 0
        continue
    said = []
    faiss_library.say, faiss_library.native.processor = said.append, lambda: "flags : " + " ".join(flags)
    os.environ.update({} if chosen is None else {"OPENBLAS_CORETYPE": chosen})
    faiss = faiss_library.load_faiss()
    faiss_library.load_faiss()
    folder = os.path.join(os.path.dirname(os.path.dirname(faiss.__file__)), "faiss_cpu.libs")
    blas = ctypes.CDLL(glob.glob(folder + "/libopenblas*")[0])
    blas.openblas_get_corename.restype = ctypes.c_char_p
    print(json.dumps([blas.openblas_get_corename().decode(), os.environ.get("OPENBLAS_CORETYPE"), said]), flush=True)
    os._exit(0)
"""
HAS_AVX512 = set(native.processor().split()) >= AVX512


@pytest.mark.skipif(not HAS_AVX512, reason="no AVX-512 here")
def test_the_kernels_of_faiss_are_those_of_the_processor():
    """Those for AVX-512, said once; what the user chose; and what OpenBLAS takes, where the flags do not have all of AVX-512."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    cases = [(sorted(AVX512), None), (sorted(AVX512), "Haswell"), (["avx2", "avx512f"], None)]
    command = [sys.executable, "-W", "ignore", "-c", KERNELS, json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    by_flags, by_hand, by_itself = map(json.loads, done.stdout.splitlines())
    assert by_flags[:2] == ["SkylakeX", None]
    assert [line.partition(" (")[0] for line in by_flags[2]] == ["faiss: OPENBLAS_CORETYPE=SkylakeX"]
    assert by_hand == ["Haswell", "Haswell", []]
    assert by_itself[1:] == [None, []]


def test_importing_heads_does_not_load_faiss():
    code = "import sys, classifiers; print('faiss' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_search_while_another_thread_adds(kind):
    bank, queries = filled(401, 7, kind)
    errors: list[BaseException] = []

    def grow() -> None:
        try:
            for _ in range(30):
                bank.add(torch.randn(7, 7), [0] * 7)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=grow)
    thread.start()
    while thread.is_alive():
        found = bank.search(queries, 5)
        assert found.mask.all()
        assert ((queries[:, None] - found.embedding).square().sum(2) - found.distance).abs().max() < 1e-5
    thread.join()
    assert not errors
    assert len(bank) == 611
