"""The reader of the rings: never a wrong mark, every lost one counted, whatever lies there instead of a ring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagetrace import marks
from stagetrace.marks import Mark, TextMark
from stagetrace.recorder import HEADER_BYTES, PAUSED_AT, Recorder
from stagetrace.rings import open_ring, set_paused
from tests.unit.helpers import DEADLINE_S, bad_pack, craft, header, keys, opened, put, record, rings

SIZE = marks.RECORD_SIZE
within_a_test = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ---------------------------------------------------------------- whole records


def test_marks_come_out_as_they_went_in(directory: Path) -> None:
    recorder = Recorder(directory, capacity=64)
    recorder.mark(marks.ROOT, (1 << 64) - 1, -(1 << 63), (1 << 63) - 1, -1, 0, t=7)
    recorder.mark(marks.STEP, 0)
    first, second = rings(directory)[0].read()
    assert first == Mark(7, marks.ROOT, (1 << 64) - 1, -(1 << 63), (1 << 63) - 1, -1, 0)
    assert isinstance(second, Mark)
    assert (second.kind, second.key, second.a) == (marks.STEP, 0, 0)
    assert second.t > 7


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 511, 512, 513, 4000])
def test_a_string_of_any_length(directory: Path, length: int) -> None:
    recorder = Recorder(directory, capacity=64)
    text = "".join(chr(97 + i % 26) for i in range(length))
    recorder.text(marks.ROUTE, 5, text)
    recorder.mark(marks.END, 5)
    string, end = rings(directory)[0].read()
    assert isinstance(string, TextMark)
    assert (string.field, string.key, string.text) == (marks.ROUTE, 5, text[:512])
    assert end.key == 5


@pytest.mark.parametrize("text", ["ä" * 600, "a" + "€" * 300, "\ud800", "x" * 511 + "é"])
def test_a_string_is_cut_between_characters(directory: Path, text: str) -> None:
    Recorder(directory, capacity=64).text(marks.ROUTE, 5, text)
    (string,) = rings(directory)[0].read()
    assert isinstance(string, TextMark)
    assert text.replace("\ud800", "?").startswith(string.text)
    assert len(string.text.encode()) in (1, 510, 511, 512)


@within_a_test
@given(st.lists(st.integers(0, 40), max_size=12), st.sampled_from([2, 4, 8, 16]))
def test_what_is_read_and_what_is_lost_is_all_there_was(
    tmp_path_factory: pytest.TempPathFactory, bursts: list[int], capacity: int
) -> None:
    directory = tmp_path_factory.mktemp("bursts")
    directory.chmod(0o700)
    recorder = Recorder(directory, capacity)
    recorder.mark(1, 0, 0)
    (ring,) = rings(directory)
    seen, written = keys(ring), 1
    for burst in bursts:
        for _ in range(burst):
            recorder.mark(1, written, written)
            written += 1
        seen += keys(ring)
        assert len(seen) + ring.lost == written
    assert seen == sorted(set(seen))
    if all(burst < capacity for burst in bursts):
        assert ring.lost == 0


def test_the_newest_of_a_lapped_ring_are_kept(directory: Path) -> None:
    recorder = Recorder(directory, capacity=64)
    for number in range(1000):
        recorder.mark(1, number)
    (ring,) = rings(directory)
    seen = keys(ring)
    assert seen == list(range(1000 - len(seen), 1000))
    assert len(seen) >= 32
    assert ring.lost == 1000 - len(seen)


# ---------------------------------------------------------------- torn records


@pytest.mark.parametrize("written", range(0, SIZE - 3))
@pytest.mark.parametrize("before", [bytes(SIZE), record(2, payload=9)], ids=["empty", "an older lap"])
def test_a_half_written_record_is_not_read(tmp_path: Path, before: bytes, written: int) -> None:
    """The writer clears the 64 bytes, then fills them from the front; the last four at once."""
    path = craft(tmp_path / "ring-1-0-0", [record(number) for number in range(1, 10)])
    ring = opened(path)
    ring.expected = 10
    put(path, 10, before)
    put(path, 10, record(10)[:written].ljust(SIZE, b"\0"))
    assert keys(ring) == []
    assert keys(ring) == []
    put(path, 10, record(10))
    assert keys(ring) == [10]
    assert ring.lost == 0


@pytest.mark.parametrize("cleared", [(0, 16), (16, 32), (32, 48), (48, 64), (32, 64), (0, 64)])
def test_a_record_that_is_overwritten_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: tuple[int, int]
) -> None:
    """Between the two looks the writer comes round: any part of the record may be the next lap's by then."""
    path = craft(tmp_path / "ring-1-0-0", [record(number, payload=number) for number in range(1, 8)])
    ring = opened(path)
    real, looks = os.pread, []

    def overtaken(descriptor: int, count: int, at: int) -> bytes:
        looks.append(at)
        if len(looks) == 2:
            put(path, 8, record(8, payload=8))
            put(path, 9, bytes(cleared[1] - cleared[0]), at=cleared[0])
        return real(descriptor, count, at)

    monkeypatch.setattr(os, "pread", overtaken)
    found = [mark for mark in ring.read() if isinstance(mark, Mark)]
    monkeypatch.undo()
    assert len(looks) > 2
    put(path, 9, record(9, payload=9))
    found += [mark for mark in ring.read() if isinstance(mark, Mark)]
    assert [mark for mark in found if mark != (mark.key, 1, *[mark.key] * 5)] == []
    assert len(found) + ring.lost == 9
    assert found[-1].key == 9


HAMMER = """
import sys
from pathlib import Path
from stagetrace.recorder import Recorder

def mix(number):
    return number * 0x9E3779B97F4A7C15 % (1 << 62)

recorder = Recorder(Path(sys.argv[1]), capacity=64)
recorder.mark(1, 0, mix(0), -mix(0), mix(1), -mix(2))
print("ready", flush=True)
for number in range(1, int(sys.argv[2])):
    recorder.mark(1, number, mix(number), -mix(number), mix(number + 1), -mix(number + 2))
"""


def test_a_writer_that_hammers(directory: Path) -> None:
    """The writer laps a tiny ring thousands of times: no mark is ever wrong, and not one is unaccounted for."""

    def mix(number: int) -> int:
        return number * 0x9E3779B97F4A7C15 % (1 << 62)

    total = 400_000
    command = [sys.executable, "-c", HAMMER, str(directory), str(total)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
        (ring,) = rings(directory)
        count, last, running = 0, -1, True
        while running:
            running = writer.poll() is None
            for mark in ring.read(final=not running):
                assert isinstance(mark, Mark)
                number = mark.key
                assert number > last
                assert mark[3:] == (mix(number), -mix(number), mix(number + 1), -mix(number + 2))
                count, last = count + 1, number
        assert writer.wait(DEADLINE_S) == 0
    assert (count + ring.lost, last) == (total, total - 1)
    assert count >= 48
    assert ring.lost > 0


def test_a_busy_writer_does_not_hold_its_reader_for_ever(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(directory, capacity=64)
    recorder.mark(1, 0)
    (ring,) = rings(directory)
    real = os.pread

    def faster(descriptor: int, count: int, at: int) -> bytes:
        for _ in range(100):
            recorder.mark(1, 0)
        return real(descriptor, count, at)

    monkeypatch.setattr(os, "pread", faster)
    assert len(keys(ring)) < 1000


# ---------------------------------------------------------------- records that never came


def test_a_mark_that_could_not_be_packed_costs_no_other_mark(directory: Path) -> None:
    recorder = Recorder(directory, capacity=64)
    recorder.mark(1, 1)
    for _ in range(5):
        bad_pack(lambda: recorder.mark(1, 2, 1 << 63))
    bad_pack(lambda: recorder.text(1, -1, "text"))
    recorder.mark(1, 3)
    (ring,) = rings(directory)
    assert keys(ring) == [1]
    assert keys(ring) == [3], "a gap is stepped over at the second look"
    recorder.mark(1, 4)
    assert keys(ring) == [4]
    assert ring.lost == 6


def test_a_mark_that_was_interrupted_by_an_earlier_end(directory: Path) -> None:
    """A signal handler's mark overtakes the one it interrupts: that one still comes, if it comes soon."""
    path = craft(directory / "ring-1-0-0", [record(1), bytes(SIZE), record(3)])
    ring = opened(path)
    assert keys(ring) == [1]
    put(path, 2, record(2))
    assert keys(ring) == [2, 3]
    assert ring.lost == 0


def test_marks_written_while_an_idle_ring_is_looked_at_are_no_gap(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds nothing, the writer writes two, and only then does the reader look further ahead."""
    recorder = Recorder(directory, capacity=64)
    recorder.mark(1, 1)
    (ring,) = rings(directory)
    assert keys(ring) == [1] and keys(ring) == []
    look = ring._ahead

    def late() -> int:
        recorder.mark(1, 2)
        recorder.mark(1, 3)
        monkeypatch.setattr(ring, "_ahead", look)
        return look()

    monkeypatch.setattr(ring, "_ahead", late)
    assert keys(ring) + keys(ring) == [2, 3]
    assert ring.lost == 0


@pytest.mark.parametrize("missing", range(8, 14))
def test_a_gap_anywhere_and_a_writer_that_is_gone(tmp_path: Path, missing: int) -> None:
    """Also where the file ends: the capacity is 8, so that record 8 lies in front of 9."""
    path = craft(tmp_path / "ring-1-0-0", [record(number) for number in range(1, 8)])
    ring = opened(path)
    assert keys(ring) == list(range(1, 8))
    for number in range(8, 15):
        put(path, number, record(number) if number != missing else record(number)[:40].ljust(SIZE, b"\0"))
    assert keys(ring, final=True) == [number for number in range(8, 15) if number != missing]
    assert ring.lost == 1


def test_a_string_with_a_hole_is_no_string(directory: Path) -> None:
    recorder = Recorder(directory, capacity=64)
    recorder.text(marks.ROUTE, 1, "a" * 100)
    recorder.text(marks.ROUTE, 2, "b" * 100)
    path = next(directory.glob("ring-*"))
    put(path, 2, bytes(SIZE), capacity=64)
    assert keys(opened(path), final=True) == [2]


# ---------------------------------------------------------------- what is no ring


def test_what_is_no_ring_is_refused(tmp_path: Path) -> None:
    good = craft(tmp_path / "good")
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.close()
    files = {
        "empty": b"",
        "short": header()[:100],
        "cut": good.read_bytes()[:-1],
        "long": good.read_bytes() + b"\0",
        "half made": b"\0" * 8 + good.read_bytes()[8:],
        "older": header(magic=b"stgtrc00") + bytes(8 * SIZE),
        "other records": header(size=72) + bytes(8 * 72),
        "other capacity": header(capacity=16) + bytes(8 * SIZE),
        "no power of two": header(capacity=7) + bytes(7 * SIZE),
        "capacity 0": header(capacity=0),
        "capacity 1": header(capacity=1) + bytes(SIZE),
        "huge capacity": header(capacity=1 << 31) + bytes(8 * SIZE),
        "text": b"GIF89a" * 10_000,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    others = {"link", "directory", "pipe", "socket", "not there"}
    assert {name for name in (*files, *others) if open_ring(tmp_path / name) is not None} == set()
    assert open_ring(good) is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_ring_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = craft(tmp_path / "ring-1-0-0", [record(1)])
    os.chown(path, 12345, 12345)
    assert open_ring(path) is None


@pytest.mark.parametrize("length", [0, 8, HEADER_BYTES, HEADER_BYTES + SIZE, HEADER_BYTES + SIZE + 30])
def test_a_ring_that_is_cut_short_while_it_is_open(tmp_path: Path, length: int) -> None:
    """Mapped, this would be a SIGBUS in the server's own parent."""
    path = craft(tmp_path / "ring-1-0-0", [record(number) for number in range(1, 8)])
    ring = opened(path)
    os.truncate(path, length)
    assert keys(ring) == []
    assert ring.refused() == 0


@within_a_test
@given(st.binary(max_size=8 * SIZE), st.integers(0, 2**64 - 1))
def test_garbage_in_a_ring_never_raises(tmp_path_factory: pytest.TempPathFactory, garbage: bytes, refused: int) -> None:
    path = tmp_path_factory.mktemp("garbage") / "ring-1-0-0"
    path.write_bytes(header() + garbage.ljust(8 * SIZE, b"\1"))
    ring = opened(path)
    for final in (False, False, True):
        assert len(list(ring.read(final))) <= 4096


def test_a_wild_sequence_number_is_no_progress(tmp_path: Path) -> None:
    path = craft(tmp_path / "ring-1-0-0", [record(1)])
    for number in ((1 << 63) + 2, (1 << 40) + 3):  # too large; of another slot
        put(path, 2, record(2)[:0] + number.to_bytes(8, sys.byteorder))
        ring = opened(path)
        assert keys(ring) == [1]
        assert keys(ring, final=True) == []
        assert ring.lost == 0


def test_a_closed_ring_lets_go_of_its_file(tmp_path: Path) -> None:
    path = craft(tmp_path / "ring-1-0-0", [record(1)])
    before = os.listdir("/proc/self/fd")
    ring = opened(path)
    ring.close()
    ring.close()
    assert keys(ring) == []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"no ring")
        open_ring(tmp_path / name)
    assert os.listdir("/proc/self/fd") == before


# ---------------------------------------------------------------- pausing


def test_pausing_writes_into_rings_only(directory: Path, tmp_path: Path) -> None:
    recorder = Recorder(directory, capacity=8)
    recorder.mark(1, 1)
    outside = craft(tmp_path / "outside")
    (directory / "ring-link").symlink_to(outside)
    (directory / "ring-foreign").write_bytes(b"stgtrc01 is not enough")
    os.mkfifo(directory / "ring-pipe")
    assert set_paused(directory, True) == 1
    assert recorder.paused()
    assert outside.read_bytes()[PAUSED_AT] == 0
    assert (directory / "ring-foreign").read_bytes() == b"stgtrc01 is not enough"
    assert set_paused(directory, False) == 1
    assert not recorder.paused()
