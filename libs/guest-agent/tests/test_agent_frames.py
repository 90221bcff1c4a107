"""Frames survive any cut, any bytes, and whatever an earlier speaker left half written."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from torpor_guest_agent.frames import FRAME_BYTES_MAX, Frame, Frames, decode, encode

values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
headers = st.dictionaries(st.text().filter(lambda key: key != "body"), values, max_size=4)
frames = st.builds(Frame, headers, st.binary(max_size=200))


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream, cut at the given places."""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:end] for start, end in itertools.pairwise(places)]


@given(st.lists(frames, max_size=5), st.lists(st.integers(0), max_size=20))
def test_what_is_sent_arrives_however_it_is_cut(sent: list[Frame], cuts: list[int]) -> None:
    taking = Frames()
    stream = b"".join(map(encode, sent))
    arrived = [frame for piece in pieces(stream, cuts) for frame in taking.feed(piece)]
    assert arrived == sent
    assert taking.dropped == 0


@given(frames)
def test_a_frame_on_its_way_has_one_zero_byte_its_last(frame: Frame) -> None:
    assert encode(frame).index(b"\x00") == len(encode(frame)) - 1


@given(frames, st.integers(0), frames)
def test_a_half_frame_costs_only_itself(cut: Frame, at: int, whole: Frame) -> None:
    """Whoever speaks after a checkpoint begins with a zero byte."""
    half = encode(cut)[:-1]
    half = half[: at % len(half)]
    taking = Frames()
    assert taking.feed(half + b"\x00" + encode(whole)) == [whole]
    assert taking.dropped == (1 if half else 0)


@given(frames, st.integers(0), frames)
def test_the_rest_of_a_frame_that_began_elsewhere_is_dropped(cut: Frame, at: int, whole: Frame) -> None:
    rest = encode(cut)[1 + at % (len(encode(cut)) - 1) :]
    taking = Frames()
    found = taking.feed(rest + encode(whole))
    assert found[-1] == whole
    assert all(isinstance(frame.header, dict) for frame in found)


@given(st.binary(max_size=2000), st.lists(st.integers(0), max_size=10), frames)
def test_any_bytes_are_taken_and_the_next_frame_arrives(noise: bytes, cuts: list[int], whole: Frame) -> None:
    taking = Frames()
    for piece in pieces(noise, cuts):
        taking.feed(piece)
    assert taking.feed(b"\x00" + encode(whole))[-1] == whole


def test_a_frame_that_is_too_long_is_dropped_and_not_kept() -> None:
    taking = Frames()
    for _ in range(2 * FRAME_BYTES_MAX // 65536):
        assert taking.feed(b"x" * 65536) == []
    assert sum(map(len, taking._parts)) <= FRAME_BYTES_MAX
    whole = Frame({"op": "ping"})
    assert taking.feed(b"\x00" + encode(whole)) == [whole]
    assert taking.dropped == 1


def test_what_is_no_frame_is_none() -> None:
    for escaped in (
        b"",
        b"{}",
        b"[1]\n",
        b"{\n",
        b"{}x\n",
        b'{"body":3}\nab',
        b'{"body":"x"}\n',
        b"[" * 100_000 + b"\n",
    ):
        assert decode(escaped) is None
    assert decode(b"{}\n") == Frame({})
