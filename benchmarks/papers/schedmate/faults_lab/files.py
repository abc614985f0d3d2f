"""Libraries that read and write files, each in the way that its users do. Nothing here knows of faults."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 1 << 18
"""Numbers of an array that is written: 2 MB as float64."""


def make(folder: Path) -> None:
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


def _torch_load(path: str) -> Any:
    import torch

    return torch.load(path)["w"].shape


def _numpy_load(path: str) -> Any:
    import numpy

    return numpy.load(path).shape


def _npz(path: str) -> Any:
    import numpy

    return numpy.load(path)["numbers"].shape


def _fromfile(path: str) -> Any:
    import numpy

    return numpy.fromfile(path).shape


def _safetensors(path: str) -> Any:
    from safetensors.torch import load_file

    return load_file(path)["w"].shape


def _csv(path: str) -> Any:
    import pandas

    return pandas.read_csv(path).shape


def _parquet(path: str) -> Any:
    import pandas

    return pandas.read_parquet(path).shape


def _image(path: str) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        return image.size


def _json(path: str) -> Any:
    with open(path) as file:
        return len(json.load(file))


def _pickle(path: str) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file).shape


def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path).get_vocab_size()


def _bert(path: str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(Path(path).parent)).config.hidden_size


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "numpy.load": ("a.npy", _numpy_load),
    "numpy.load (npz)": ("a.npz", _npz),
    "numpy.fromfile": ("a.bin", _fromfile),
    "torch.load": ("a.pt", _torch_load),
    "safetensors": ("a.safetensors", _safetensors),
    "pandas (csv)": ("a.csv", _csv),
    "pyarrow (parquet)": ("a.parquet", _parquet),
    "pillow": ("a.png", _image),
    "json": ("a.json", _json),
    "pickle": ("a.pickle", _pickle),
    "tokenizers": ("tokenizer.json", _tokenizer),
    "transformers": ("bert/config.json", _bert),
}
"""By library: the file that it reads, and how."""


def _tensor() -> Any:
    import torch

    return torch.arange(SIZE, dtype=torch.float64)


def _torch_save(path: str) -> None:
    import torch

    torch.save({"w": _tensor()}, path)


def _torch_save_old(path: str) -> None:
    import torch

    torch.save({"w": _tensor()}, path, _use_new_zipfile_serialization=False)


def _safetensors_save(path: str) -> None:
    from safetensors.torch import save_file

    save_file({"w": _tensor()}, path)


def _numpy_save(path: str) -> None:
    import numpy

    numpy.save(path, numpy.arange(SIZE, dtype="float64"))


def _savez(path: str) -> None:
    import numpy

    numpy.savez(path, numbers=numpy.arange(SIZE, dtype="float64"))


def _parquet_save(path: str) -> None:
    import numpy
    import pandas

    pandas.DataFrame({"x": numpy.random.default_rng(1).random(SIZE)}).to_parquet(path)


def _csv_save(path: str) -> None:
    import numpy
    import pandas

    pandas.DataFrame({"x": numpy.arange(SIZE // 4)}).to_csv(path)


def _image_save(path: str) -> None:
    import numpy
    from PIL import Image

    Image.frombytes("L", (1024, 1024), numpy.random.default_rng(1).bytes(1 << 20)).save(path + ".png")


def _pickle_save(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(bytes(SIZE * 8), file)


def _copy(path: str) -> None:
    shutil.copyfile("/usr/bin/git" if Path("/usr/bin/git").exists() else "/bin/bash", path)


def _bert_save(path: str) -> None:
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(vocab_size=9000, hidden_size=64, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        path
    )


WRITERS: dict[str, Callable[[str], None]] = {
    "numpy.save": _numpy_save,
    "numpy.savez": _savez,
    "torch.save": _torch_save,
    "torch.save (pickle)": _torch_save_old,
    "safetensors": _safetensors_save,
    "pyarrow (parquet)": _parquet_save,
    "pandas (csv)": _csv_save,
    "pillow": _image_save,
    "pickle": _pickle_save,
    "shutil.copyfile": _copy,
    "transformers": _bert_save,
}
"""By library: how it writes some megabytes to a path."""
