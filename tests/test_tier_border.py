"""The border between CPU and device for host cells: monotone in both rates, and corrected by what was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from hybridgen_gguf.adapt.border import Feedback, observed
from hybridgen_gguf.plan.border import TierRates, cpu_tokens, host_share

rates = st.builds(TierRates, st.floats(1e8, 1e12), st.floats(1e8, 1e12), st.integers(1, 64))


def test_a_server_decodes_on_the_cpu_and_streams_prompts() -> None:
    border = cpu_tokens(TierRates(cpu=80e9, link=55e9, cpu_rows=8), heads_per_kv_head=4)
    assert border == 2  # three tokens are twelve rows: 1.5 reads' time on the CPU, 1.45 by copying


def test_a_slow_cpu_is_not_used() -> None:
    assert cpu_tokens(TierRates(cpu=10e9, link=25e9), heads_per_kv_head=1) == 0
    assert cpu_tokens(TierRates(cpu=0.0, link=25e9), heads_per_kv_head=1) == 0


@given(rates, st.integers(1, 16), st.floats(1.0, 4.0))
def test_a_faster_cpu_never_moves_the_border_down_and_a_faster_link_never_up(
    r: TierRates, group: int, f: float
) -> None:
    border = cpu_tokens(r, group)
    assert cpu_tokens(replace(r, cpu=r.cpu * f), group) >= border
    assert cpu_tokens(replace(r, link=r.link * f), group) <= border


def test_the_link_carries_what_the_cpu_leaves_of_the_memory() -> None:
    assert host_share(TierRates(cpu=34e9, link=55e9), memory=93e9) == 0.6  # bound by arithmetic: the link works fully
    assert host_share(TierRates(cpu=72e9, link=55e9), memory=93e9) == 0.2
    assert host_share(TierRates(cpu=40e9, link=25e9), memory=42e9) == 0.0  # the CPU takes it all
    assert host_share(TierRates(cpu=0.0, link=25e9), memory=42e9) == 0.0


@given(rates, st.floats(1e8, 1e12))
def test_a_share_is_a_share(r: TierRates, memory: float) -> None:
    assert 0 <= host_share(r, memory) < 1


@given(rates, st.floats(1e8, 1e12))
def test_observation_ends_at_what_is_observed(r: TierRates, seen: float) -> None:
    for _ in range(100):
        r = observed(r, int(seen), 1.0)
    assert abs(r.cpu / int(seen) - 1) < 1e-3
    assert observed(r, 0, 1.0) == r


@dataclass(frozen=True)
class Seen:
    """What Feedback reads of the engine's counters."""

    steps_tiered: int = 0
    steps_streamed: int = 0
    bytes_host: int = 0
    bytes_streamed: int = 0
    cpu_s: float = 0.0


class Machine:
    """A context on a machine of these rates; a step takes 5 ms beside the attention to 1 GB of host cells."""

    def __init__(self, cpu: float, link: float, border: int = 8) -> None:
        self.cpu, self.link, self.border = cpu, link, border
        self.seen = Seen()
        self.now = 0.0
        self.seconds = 0.0

    def tier_counters(self) -> Seen:
        return self.seen

    def set_cpu_tokens(self, cpu_tokens: int) -> bool:
        self.border = cpu_tokens
        return True

    def synchronize(self) -> None:
        self.now += self.seconds  # the call that reads a token returns before the device is done

    def run(self, feedback: Feedback, tokens: int) -> float:
        """Seconds for so many tokens."""
        start = self.now
        for _ in range(tokens):
            on_cpu = self.border > 0
            attention = 1e9 / (self.cpu if on_cpu else self.link)
            self.seconds = 5e-3 + attention
            was = self.seen
            self.seen = replace(
                was,
                steps_tiered=was.steps_tiered + 1,
                steps_streamed=was.steps_streamed + (not on_cpu),
                bytes_host=was.bytes_host + on_cpu * 10**9,
                bytes_streamed=was.bytes_streamed + (not on_cpu) * 10**9,
                cpu_s=was.cpu_s + on_cpu * attention,
            )
            feedback.on_token(0.0)
        return self.now - start


def feedback_of(machine: Machine, border: int | None = None) -> Feedback:
    return Feedback(machine, 4, border, clock=lambda: machine.now)


@given(st.floats(1e9, 2e11), st.floats(1e9, 2e11), st.sampled_from([0, 1, 8]))
def test_feedback_ends_on_the_faster_side(cpu: float, link: float, start: int) -> None:
    machine = Machine(cpu, link, start)
    feedback = feedback_of(machine, start)
    machine.run(feedback, 20)
    least, most = (cpu_tokens(TierRates(cpu * f, link), 4) for f in (1 - 1e-6, 1 + 1e-6))
    assert least <= feedback.border == machine.border <= most
    assert abs(feedback.rates.cpu / cpu - 1) < 1e-6 and abs(feedback.rates.link / link - 1) < 1e-6


@given(st.floats(1e9, 2e11), st.floats(1.0, 50.0))
def test_trials_cost_little(link: float, faster: float) -> None:
    machine = Machine(link * faster, link, 8)
    feedback = feedback_of(machine)
    machine.run(feedback, 16)
    usual = 5e-3 + 1e9 / machine.cpu
    slow = 5e-3 + 1e9 / link
    assert machine.run(feedback, 2590) < 2590 * usual + 31 * slow, "three tokens in 259 are tried the other way"


def test_a_machine_that_changes_is_followed() -> None:
    machine = Machine(80e9, 55e9)
    feedback = feedback_of(machine)
    machine.run(feedback, 20)
    assert machine.border > 0
    machine.cpu = 10e9  # another process takes the memory's bandwidth
    machine.run(feedback, 600)
    assert machine.border == 0
    machine.cpu = 80e9
    machine.run(feedback, 2000)
    assert machine.border > 0


def test_without_host_cells_nothing_is_tried() -> None:
    machine = Machine(80e9, 55e9)
    feedback = feedback_of(machine)
    for _ in range(1000):
        feedback.on_token(1e-3)
    assert machine.border == 8 and feedback.rates == TierRates(0.0, 0.0)
