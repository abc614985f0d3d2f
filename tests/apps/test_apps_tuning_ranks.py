"""Gangs of real processes compute the same numbers as one, and notice a lost rank."""

import re
import signal
import socket

import pytest
from lazily import lazily
from tuning import gang

from stoker.contexts import payloads
from stoker.contexts.ambient import Evicted
from stoker.errors import ConfigError
from stoker.tuning import pace
from stoker.tuning.order import Tuned
from stoker.units import parse_seconds

torch, tiny, exchange, tuner = lazily(
    "torch", "tuning.tiny", "stoker.tuning.exchange", "stoker.tuning.tune", needs="peft"
)


def specs(size, **more):
    where = gang.rendezvous() if size > 1 else ""
    return [{"rank": rank, "size": size, "rendezvous": where, **more} for rank in range(size)]


def tuned(size, each=None, **more):
    """The result of every rank of a gang; `each` has more options of single ranks."""
    found = [{**spec, "job": tiny.job(), **(each or {}).get(spec["rank"], {})} for spec in specs(size, **more)]
    with gang.gang("tune", found) as ranks:
        return ranks.answers(), [process.exitcode for process in ranks.processes]


@pytest.fixture(scope="module")
def alone():
    """The job in a piece, on one rank."""
    torch.set_num_threads(1)
    return tuner.tune(tiny.context(), tiny.job(), tiny.samples())


def prompt(result):
    import safetensors.torch

    return safetensors.torch.load(result.adapter)["prompt_embeddings"]


def same(one, other):
    """Whether two results are the same up to rounding, which optimizer steps make larger."""
    points = zip(one.points, other.points, strict=True)
    return torch.allclose(prompt(one), prompt(other), atol=1e-4) and all(
        (here.iteration, here.loss) == (there.iteration, pytest.approx(there.loss, rel=1e-4)) for here, there in points
    )


@pytest.mark.long
def test_four_ranks_have_the_gradient_of_one():
    with gang.gang("gradient", specs(1)) as ranks:
        (one,) = ranks.answers()
    with gang.gang("gradient", specs(4)) as ranks:
        four = ranks.answers()
    assert four == [four[0]] * 4, "every rank has the same bits"
    one, four = torch.tensor(one), torch.tensor(four[0])
    assert float(four[-1]) == float(one[-1])
    assert float((four - one)[:-2].norm() / one[:-2].norm()) < 1e-5
    assert float((four - one)[:-2].abs().max() / one[:-2].abs().max()) < 1e-5
    assert float(four[-2]) == pytest.approx(float(one[-2]), rel=1e-6)


def test_four_ranks_tune_as_one_does(alone):
    answers, _ = tuned(4)
    assert all(isinstance(answer, Tuned) for answer in answers), answers
    assert len({(answer.adapter, answer.points, answer.held_out) for answer in answers}) == 1
    assert same(answers[0], alone)
    assert answers[0].devices == 4
    assert 0 < answers[0].communication_share < 1


@pytest.mark.long
def test_more_ranks_than_samples_in_a_batch(alone):
    small = tiny.job(batch=2, iterations=2)
    answers, _ = tuned(3, each={rank: {"job": small} for rank in range(3)})
    assert same(answers[2], tuner.tune(tiny.context(), small, tiny.samples()))


@pytest.mark.long
def test_a_killed_job_resumes_from_its_checkpoint_exactly(alone, tmp_path):
    # The pass in which it dies is the 4th iteration's: evaluations at 0 and 2 take one each.
    answers, codes = tuned(1, each={0: {"die_at": 6, "folder": tmp_path}})
    assert answers == [None]
    assert codes[0] in (None, -signal.SIGKILL)
    seen = []
    rest = tuner.tune(tiny.context(), tiny.job(), tiny.samples(), folder=tmp_path, report=seen.append)
    assert seen[0].iteration == 4
    assert (rest.adapter, rest.points, rest.held_out) == (alone.adapter, alone.points, alone.held_out)


@pytest.mark.long
def test_a_lost_rank_is_told_and_the_job_goes_on_with_what_is_left(alone, tmp_path):
    answers, _ = tuned(3, each={1: {"die_at": 6}, 0: {"folder": tmp_path}})
    assert answers[1] is None
    for rank in (0, 2):
        assert isinstance(answers[rank], exchange.ExchangeError), answers
        assert f"rank {rank} of 3 lost a rank" in str(answers[rank])
    answers, _ = tuned(2, each={0: {"folder": tmp_path}})
    assert all(same(answer, alone) for answer in answers)


@pytest.mark.long
def test_all_ranks_make_room_together_when_one_is_asked_to(alone):
    answers, _ = tuned(2, each={1: {"leave_at": 3}})
    assert all(isinstance(answer, Evicted) for answer in answers), answers
    checkpoints = [payloads.loads(answer.state) for answer in answers]
    answers, _ = tuned(4, each={0: {"start": checkpoints[1]}})
    assert all(same(answer, alone) for answer in answers)


def test_a_gang_scores_together_and_every_rank_begins_from_the_same(tmp_path):
    with gang.gang("choose", specs(1, bank=str(tmp_path / "one"))) as ranks:
        ((text, scored, _),) = ranks.answers()
    with gang.gang("choose", specs(3, bank=str(tmp_path / "three"))) as ranks:
        answers = ranks.answers()
    assert [answer[0] for answer in answers] == [text] * 3
    assert sum(answer[1] for answer in answers) == scored
    assert all(answer[1] >= scored // 5 for answer in answers), "single prompts are scored by rank 0"
    remembered = pace.read_paces(tmp_path / "three")["cpu"]
    took_s = parse_seconds(answers[0][2].rpartition(" in ")[2])
    printed_to = 0.05  # it is said to a tenth of a second
    told = pytest.approx(3 * took_s, rel=0.1, abs=3 * printed_to + 0.01)
    assert remembered.lookup_s == told, "seconds of one device, not of this gang"
    assert remembered.score_s == pytest.approx(remembered.lookup_s / scored)


def test_ranks_that_wait_in_vain_say_who_did_not_come():
    three = specs(3, limit_s=2.0)
    with gang.gang("meet", [three[0], three[2]]) as ranks:
        first, last = ranks.answers()
    assert isinstance(first, exchange.ExchangeError)
    assert "rank 0 of 3 waited" in str(first)
    assert re.search("ranks? 1(, 2)? did not come", str(first))
    assert isinstance(last, exchange.ExchangeError)
    with gang.gang("meet", [three[2]]) as ranks:
        (lonely,) = ranks.answers()
    assert isinstance(lonely, exchange.ExchangeError)
    assert "rank 2 of 3 did not find rank 0 at 127.0.0.1:" in str(lonely)


def test_strangers_part_with_an_error():
    two = specs(2)
    with gang.gang("meet", [{**two[0], "job": "one"}, {**two[1], "job": "other"}]) as ranks:
        answers = ranks.answers()
    assert all(
        isinstance(answer, exchange.ExchangeError) and "another job or gang" in str(answer) for answer in answers
    ), answers


def test_an_address_that_rank_0_cannot_serve_is_told_at_once():
    two = specs(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = f"127.0.0.1:{taken.getsockname()[1]}"
        for where, why in ((there, "in use"), ("192.0.2.1:29500", "assign")):
            with pytest.raises(
                exchange.ExchangeError, match=f"rank 0 of 2 cannot serve the rendezvous at {where}: .*{why}.*free"
            ):
                gang.meet({**two[0], "rendezvous": where})


def test_two_processes_of_one_rank_are_one_too_many():
    three = specs(3)
    with gang.gang("meet", [three[0], three[1], three[1]]) as early:
        refused = early.first([1, 2])
        assert isinstance(refused, exchange.ExchangeError)
        assert "rank 1 of 3 is at 127.0.0.1:" in str(refused)
        with gang.gang("meet", [three[2]]) as late:
            assert late.answers() == [6.0]
        assert early.first([0]) == 6.0


def test_a_process_may_meet_others_again_and_again():
    both = zip(specs(2), specs(2), strict=True)
    with gang.gang("meet_twice", [{"first": first, "second": second} for first, second in both]) as ranks:
        assert ranks.answers() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"rank": 2, "size": 2, "rendezvous": "127.0.0.1:29500"}, "rank 2 of 2: ranks count from 0"),
        ({"rank": 0, "size": 2, "rendezvous": "29500"}, "is no address; write host:port"),
        ({"rank": 0, "size": 2, "rendezvous": "127.0.0.1:x"}, "is no address"),
    ],
)
def test_a_place_that_cannot_be_is_refused(spec, said):
    with pytest.raises(ConfigError, match=said):
        gang.meet(spec)
