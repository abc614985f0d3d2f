import pytest
from lazily import lazily

from stoker.errors import ConfigError
from stoker.tuning.order import Point

torch, checkpoint = lazily("torch", "stoker.tuning.tune", needs="peft")
POINT = Point(10, 0.5, 2.5)


def state(job="job"):
    header = checkpoint.Header(job, 12, points=(POINT,), best=POINT, spent_s={"compute": 2.0})
    prompt = torch.arange(6.0).view(2, 3)
    return checkpoint.TuningState(header, prompt, prompt, {"step": torch.tensor(12.0), "exp_avg": prompt + 1})


def test_unpacked_checkpoint_equals_the_packed_state():
    found = checkpoint.unpack_state(checkpoint.pack_state(state()), job="job")
    assert found is not None
    assert found.header == state().header
    assert torch.equal(found.prompt, state().prompt)
    assert torch.equal(found.best, state().best)
    assert {name: value.tolist() for name, value in found.optimizer.items()} == {
        name: value.tolist() for name, value in state().optimizer.items()
    }


def test_damaged_checkpoint_is_ignored_with_a_warning(caplog):
    data = checkpoint.pack_state(state())
    assert checkpoint.unpack_state(b"", job="job") is None
    assert not caplog.records
    for damaged in (data[:-1], data[: len(data) // 2], data[:7], b"\0" * 100, b"{}", data[:8] + b"x" + data[9:]):
        caplog.clear()
        assert checkpoint.unpack_state(damaged, job="job") is None
        assert "cannot be read" in caplog.text


def test_checkpoint_of_another_job_is_refused():
    with pytest.raises(ConfigError, match=r"another job or other data \(job; this job is new\)"):
        checkpoint.unpack_state(checkpoint.pack_state(state()), job="new")


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_restored_optimizer_continues_exactly(kind):
    def steps(parameter, optimizer, count):
        for _ in range(count):
            parameter.grad = parameter.detach() + 1
            optimizer.step()

    def fresh(values):
        parameter = torch.nn.Parameter(values.clone())
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return parameter, getattr(torch.optim, kind)([parameter], lr=0.1, **more)

    whole, optimizer = fresh(torch.ones(3))
    steps(whole, optimizer, 5)
    first, before = fresh(torch.ones(3))
    steps(first, before, 2)
    second, after = fresh(first.detach())
    checkpoint.restore_optimizer(after, checkpoint.optimizer_tensors(before))
    steps(second, after, 3)
    assert torch.equal(second, whole)
