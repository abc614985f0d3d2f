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
    import numpy
    import pandas
    import torch
    from PIL import Image
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertModel

    numbers = numpy.arange(SIZE, dtype="float64")
    numpy.save(folder / "a.npy", numbers)
    numpy.savez(folder / "a.npz", numbers=numbers)
    numbers.tofile(folder / "a.bin")
    torch.save({"w": torch.from_numpy(numbers)}, folder / "a.pt")
    save_file({"w": torch.from_numpy(numbers)}, str(folder / "a.safetensors"))
    frame = pandas.DataFrame({"x": numbers[:4096]})
    frame.to_csv(folder / "a.csv")
    frame.to_parquet(folder / "a.parquet")
    Image.frombytes("L", (512, 512), numpy.random.default_rng(1).bytes(1 << 18)).save(folder / "a.png")
    (folder / "a.json").write_text(json.dumps(list(range(9000))))
    (folder / "a.pickle").write_bytes(pickle.dumps(numbers))
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    tiny = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(tiny).save_pretrained(folder / "bert")


def _image(path: str) -> Any:
    with of("PIL.Image").open(path) as image:
        image.load()
        return image.size


def _json(path: str) -> Any:
    with open(path) as file:
        return len(json.load(file))


def _pickle(path: str) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file).shape


def _bert(path: str) -> Any:
    return of("transformers").AutoModel.from_pretrained(str(Path(path).parent)).config.hidden_size


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "numpy.load": ("a.npy", lambda path: of("numpy").load(path).shape),
    "numpy.load (npz)": ("a.npz", lambda path: of("numpy").load(path)["numbers"].shape),
    "numpy.fromfile": ("a.bin", lambda path: of("numpy").fromfile(path).shape),
    "torch.load": ("a.pt", lambda path: of("torch").load(path)["w"].shape),
    "safetensors": ("a.safetensors", lambda path: of("safetensors.torch").load_file(path)["w"].shape),
    "pandas (csv)": ("a.csv", lambda path: of("pandas").read_csv(path).shape),
    "pyarrow (parquet)": ("a.parquet", lambda path: of("pandas").read_parquet(path).shape),
    "pillow": ("a.png", _image),
    "json": ("a.json", _json),
    "pickle": ("a.pickle", _pickle),
    "tokenizers": ("tokenizer.json", lambda path: of("tokenizers").Tokenizer.from_file(path).get_vocab_size()),
    "transformers": ("bert/config.json", _bert),
}


def _numbers() -> Any:
    return of("numpy").arange(SIZE, dtype="float64")


def _tensors() -> dict[str, Any]:
    return {"w": of("torch").arange(SIZE, dtype=of("torch").float64)}


def _parquet_save(path: str) -> None:
    of("pandas").DataFrame({"x": of("numpy").random.default_rng(1).random(SIZE)}).to_parquet(path)


def _image_save(path: str) -> None:
    noise = of("numpy").random.default_rng(1).bytes(1 << 20)
    of("PIL.Image").frombytes("L", (1024, 1024), noise).save(path + ".png")


def _pickle_save(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(bytes(SIZE * 8), file)


def _copy(path: str) -> None:
    shutil.copyfile("/usr/bin/git" if Path("/usr/bin/git").exists() else "/bin/bash", path)


def _bert_save(path: str) -> None:
    shape = {"vocab_size": 9000, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    of("transformers").BertModel(of("transformers").BertConfig(**shape)).save_pretrained(path)


WRITERS: dict[str, Callable[[str], Any]] = {
    "numpy.save": lambda path: of("numpy").save(path, _numbers()),
    "numpy.savez": lambda path: of("numpy").savez(path, numbers=_numbers()),
    "torch.save": lambda path: of("torch").save(_tensors(), path),
    "torch.save (pickle)": lambda path: of("torch").save(_tensors(), path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: of("safetensors.torch").save_file(_tensors(), path),
    "pyarrow (parquet)": _parquet_save,
    "pandas (csv)": lambda path: of("pandas").DataFrame({"x": of("numpy").arange(SIZE // 4)}).to_csv(path),
    "pillow": _image_save,
    "pickle": _pickle_save,
    "shutil.copyfile": _copy,
    "transformers": _bert_save,
}
