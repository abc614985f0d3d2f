"""Read and write files with common libraries."""

import json
import pickle
import shutil
from collections.abc import Callable
from importlib import import_module as of
from pathlib import Path
from typing import Any

SIZE = 1 << 18
"""Elements of an array: 2 MB as float64."""


def make_data_files(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    numbers, tensors = _numbers(), _tensors()
    frame = of("pandas").DataFrame({"x": numbers[:4096]})
    of("numpy").save(folder / "a.npy", numbers)
    of("numpy").savez(folder / "a.npz", numbers=numbers)
    numbers.tofile(folder / "a.bin")
    of("torch").save(tensors, folder / "a.pt")
    of("safetensors.torch").save_file(tensors, str(folder / "a.safetensors"))
    frame.to_csv(folder / "a.csv")
    frame.to_parquet(folder / "a.parquet")
    _noise_image(512).save(folder / "a.png")
    (folder / "a.json").write_text(json.dumps(list(range(9000))))
    (folder / "a.pickle").write_bytes(pickle.dumps(numbers))
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    _bert(vocab_size=30, hidden_size=8, intermediate_size=8).save_pretrained(folder / "bert")


def _numbers() -> Any:
    return of("numpy").arange(SIZE, dtype="float64")


def _tensors() -> dict[str, Any]:
    return {"w": of("torch").arange(SIZE, dtype=of("torch").float64)}


def _noise_image(side: int) -> Any:
    noise = of("numpy").random.default_rng(1).bytes(side * side)
    return of("PIL.Image").frombytes("L", (side, side), noise)


def _bert(**shape: int) -> Any:
    config = of("transformers").BertConfig(num_hidden_layers=1, num_attention_heads=1, **shape)
    return of("transformers").BertModel(config)


def _read_image(path: str) -> Any:
    with of("PIL.Image").open(path) as image:
        image.load()
        return image.size


def _read_with(load: Callable[[Any], Any], mode: str) -> Callable[[str], Any]:
    def read(path: str) -> Any:
        with open(path, mode) as file:
            return len(load(file))

    return read


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "numpy.load": ("a.npy", lambda path: of("numpy").load(path).shape),
    "numpy.load (npz)": ("a.npz", lambda path: of("numpy").load(path)["numbers"].shape),
    "numpy.fromfile": ("a.bin", lambda path: of("numpy").fromfile(path).shape),
    "torch.load": ("a.pt", lambda path: of("torch").load(path)["w"].shape),
    "safetensors": ("a.safetensors", lambda path: of("safetensors.torch").load_file(path)["w"].shape),
    "pandas (csv)": ("a.csv", lambda path: of("pandas").read_csv(path).shape),
    "pyarrow (parquet)": ("a.parquet", lambda path: of("pandas").read_parquet(path).shape),
    "pillow": ("a.png", _read_image),
    "json": ("a.json", _read_with(json.load, "r")),
    "pickle": ("a.pickle", _read_with(pickle.load, "rb")),
    "tokenizers": ("tokenizer.json", lambda path: of("tokenizers").Tokenizer.from_file(path).get_vocab_size()),
    "transformers": (
        "bert/config.json",
        lambda path: of("transformers").AutoModel.from_pretrained(str(Path(path).parent)).config.hidden_size,
    ),
}


def _write_pickle(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(bytes(SIZE * 8), file)


_COPIED = "/usr/bin/git" if Path("/usr/bin/git").exists() else "/bin/bash"
WRITERS: dict[str, Callable[[str], Any]] = {
    "numpy.save": lambda path: of("numpy").save(path, _numbers()),
    "numpy.savez": lambda path: of("numpy").savez(path, numbers=_numbers()),
    "torch.save": lambda path: of("torch").save(_tensors(), path),
    "torch.save (pickle)": lambda path: of("torch").save(_tensors(), path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: of("safetensors.torch").save_file(_tensors(), path),
    "pyarrow (parquet)": lambda path: (
        of("pandas").DataFrame({"x": of("numpy").random.default_rng(1).random(SIZE)}).to_parquet(path)
    ),
    "pandas (csv)": lambda path: of("pandas").DataFrame({"x": of("numpy").arange(SIZE // 4)}).to_csv(path),
    "pillow": lambda path: _noise_image(1024).save(path + ".png"),
    "pickle": _write_pickle,
    "shutil.copyfile": lambda path: shutil.copyfile(_COPIED, path),
    "transformers": lambda path: _bert(vocab_size=9000, hidden_size=64).save_pretrained(path),
}
