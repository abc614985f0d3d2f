"""Fingerprints of what torch, pandas and polars hold: a change in place is seen, whichever way it is written."""

from __future__ import annotations

import pytest
from lazily import lazily

from stoker.contexts.fingerprint import Fingerprint

torch = lazily("torch")


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def fill(net):
    with torch.no_grad():
        net[2].weight.fill_(3)


def add_bias(net):
    net[2].bias.data += 1


CHANGES = {
    "a parameter that is filled": fill,
    "a parameter's data": add_bias,
    "a parameter's numpy view": lambda net: net[0].weight.detach().numpy().fill(1),
    "a loaded state": lambda net: net.load_state_dict(network().state_dict()),
    "a buffer": lambda net: net[1].running_mean.add_(1),
    "evaluation": lambda net: net.eval(),
    "a frozen parameter": lambda net: net[0].weight.requires_grad_(False),
    "a layer": lambda net: net.__setitem__(2, torch.nn.Linear(3, 1)),
    "a layer more": lambda net: net.append(torch.nn.ReLU()),
    "a parameter": lambda net: setattr(net[0], "weight", torch.nn.Parameter(torch.ones(3, 4))),
    "a kind of number": lambda net: net.double(),
    "a hook": lambda net: net.register_forward_hook(lambda *_: None),
    "a setting": lambda net: setattr(net[1], "eps", 0.5),
    "an attribute": lambda net: setattr(net, "note", "x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_network_that_changes_in_place_is_seen(change):
    net = network()
    holder = {"net": [net]}
    before, within = Fingerprint(net), Fingerprint(holder)
    assert before.matches(net)
    assert within.matches(holder)
    change(net)
    assert not before.matches(net)
    assert not within.matches(holder)
    assert Fingerprint(net).matches(net)


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_step_of_an_optimizer_is_seen(kind, way):
    net = torch.nn.Linear(4, 1)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **way)
    net(torch.ones(2, 4)).sum().backward()
    before = Fingerprint(net)
    assert before.matches(net)
    optimizer.step()
    assert not before.matches(net)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: torch.zeros(3, dtype=torch.bfloat16),
        lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
        lambda: torch.zeros((600, 600)),
        lambda: torch.zeros((600, 600)).t()[::2],
        lambda: torch.zeros(()),
        lambda: torch.zeros(3, dtype=torch.bool),
        lambda: torch.eye(3).to_sparse(),
    ],
)
def test_a_tensor_that_changes_in_place_is_seen(make):
    tensor = make()
    before = Fingerprint(tensor)
    assert before.matches(tensor)
    if tensor.layout is torch.strided:
        tensor.data[(-1,) * tensor.ndim] = 1  # its version stays as it is
    else:
        tensor.mul_(2)
    assert not before.matches(tensor)


def test_a_tensor_of_inference_mode_is_seen():
    with torch.inference_mode():
        tensor = torch.zeros(3)
        before = Fingerprint(tensor)
        assert before.matches(tensor)
        tensor.add_(1)
    assert not before.matches(tensor)


def test_a_network_that_only_computes_stays_the_same():
    net = network().eval()
    before = Fingerprint(net)
    with torch.no_grad():
        net(torch.ones(2, 4))
    assert before.matches(net)


pandas = pytest.importorskip("pandas")


def frame():
    return pandas.DataFrame({
        "number": [1, 2],
        "text": ["a", "b"],
        "time": pandas.to_datetime(["2020-01-01", "2020-01-02"]),
        "kind": pandas.Categorical(["u", "v"]),
        "masked": pandas.array([1, None], dtype="Int64"),
        "object": pandas.Series([[1], None], dtype=object),
    })  # fmt: skip


@pytest.mark.filterwarnings("ignore:The inplace keyword")
@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.__setitem__("number", [3, 4]),
        lambda v: v.__setitem__("more", 1),
        lambda v: v.loc.__setitem__((0, "number"), 7),
        lambda v: v.loc.__setitem__((0, "text"), "z"),
        lambda v: v.loc.__setitem__((0, "time"), pandas.Timestamp("2021-01-01")),
        lambda v: v.loc.__setitem__((0, "kind"), "v"),
        lambda v: v.loc.__setitem__((1, "masked"), 5),
        lambda v: v["object"][0].append(2),
        lambda v: v.rename(columns={"number": "n"}, inplace=True),
        lambda v: v.drop(index=0, inplace=True),
        lambda v: v.sort_values("number", ascending=False, inplace=True),
    ],
)
def test_a_frame_that_changes_in_place_is_seen(change):
    table = frame()
    before = Fingerprint([table])
    repr(table)  # what pandas caches is no change
    table.describe()
    assert table["number"].sum() == 3
    assert before.matches([table])
    change(table)
    assert not before.matches([table])


def test_a_series_that_changes_in_place_is_seen():
    column = pandas.Series([1.0, 2.0], name="a")
    before = Fingerprint(column)
    assert before.matches(column)
    column[0] = 5
    assert not before.matches(column)
    before = Fingerprint(column)
    column.name = "b"
    assert not before.matches(column)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.__setitem__((0, "a"), 9),
        lambda v: v.insert_column(0, v["a"].alias("b")),
        lambda v: setattr(v, "columns", ["z", "s"]),
        lambda v: v.extend(v.clone()),
        lambda v: v.replace_column(0, v["a"].reverse()),
    ],
    ids=["element", "column", "name", "rows", "order of a column"],
)
def test_a_frame_of_polars_that_changes_in_place_is_seen(change):
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"a": [1, 2, 3], "s": ["x", None, "y"]})
    column = table["a"].clone()
    before, of_column = Fingerprint([table]), Fingerprint(column)
    assert before.matches([table])
    change(table)
    assert not before.matches([table])
    assert of_column.matches(column)
    column[0] = 7
    assert not of_column.matches(column)


def test_two_rows_of_a_large_frame_of_polars_that_change_places_are_seen():
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"a": range(20_000)})
    before = Fingerprint(table)
    assert before.matches(table)
    table[7, "a"], table[9, "a"] = 9, 7
    assert not before.matches(table)


def test_two_elements_of_a_large_tensor_that_change_places_are_seen():
    tensor = torch.arange(200_000, dtype=torch.bfloat16)
    before = Fingerprint(tensor)
    assert before.matches(tensor)
    tensor.data[[5, 9]] = tensor.data[[9, 5]]
    assert not before.matches(tensor)
