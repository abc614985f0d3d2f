"""Facts of a function and its context (SchedMate §3.1, Figure 6), and the names and calls in source code that show each
fact. `model`, `task` and `data` are mandatory, but may be "unknown".
"""

from __future__ import annotations

import os.path
import re
from typing import Any

import msgspec

from stoker.manager.advice.secrets import mask_secrets
from stoker.manager.advice.source.reading import CallSite, ImportedName, KnownValue, NamedFile

# ---- facts


Scalar = str | int | float

UNKNOWN = "unknown"

MANDATORY = ("model", "task", "data")
COUNT_FIELDS = ("batch_size", "epochs", "items", "steps", "sequence_length")
FIELDS = (*MANDATORY, *COUNT_FIELDS, "precision", "framework", "devices")
"""The fields of `WorkloadFacts` that contain facts. `devices` may be a text (`"cuda"`) or a number."""


class SourceFact(msgspec.Struct, frozen=True):
    """A value from source code. `sure`: certainty from 0 to 1."""

    value: Scalar
    sure: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.value != UNKNOWN or self.sure > 0


NOT_FOUND = SourceFact(UNKNOWN)


class WorkloadFacts(msgspec.Struct, frozen=True):
    """Facts of a function or a loader. `further`: other facts, by name. `text`: the normalised code of all scanned
    functions. `same`: a digest of `text` and the arguments.
    """

    model: SourceFact = NOT_FOUND
    task: SourceFact = NOT_FOUND
    data: SourceFact = NOT_FOUND
    batch_size: SourceFact | None = None
    epochs: SourceFact | None = None
    items: SourceFact | None = None
    steps: SourceFact | None = None
    sequence_length: SourceFact | None = None
    precision: SourceFact | None = None
    framework: SourceFact | None = None
    devices: SourceFact | None = None
    further: dict[str, SourceFact] = {}
    notes: tuple[str, ...] = ()
    text: str = ""
    same: str = ""

    def known_facts(self) -> dict[str, SourceFact]:
        found = {field: getattr(self, field) for field in FIELDS}
        return {field: fact for field, fact in found.items() if fact is not None and fact.is_known}


def mask_secrets_in_facts(facts: WorkloadFacts) -> WorkloadFacts:
    shown = {name: f"{name}={fact.value}" for name, fact in facts.further.items()}
    further = {name: fact for name, fact in facts.further.items() if mask_secrets(shown[name]) == shown[name]}
    return msgspec.structs.replace(facts, further=further, text=mask_secrets(facts.text))


def is_valid_value(field: str, value: object) -> bool:
    if isinstance(value, bool):
        return False
    if field in COUNT_FIELDS:
        return isinstance(value, int) and 1 <= value < 10**12
    if isinstance(value, str):
        return bool(value.strip()) and len(value) <= 300 and value.isprintable() and value != UNKNOWN
    return field == "devices" and isinstance(value, int) and 1 <= value <= 100_000


# ---- names and calls that show facts


NAMES_BY_FIELD = {
    "batch_size": (
        "batch_size batchsize batch bs train_batch_size per_device_train_batch_size per_device_eval_batch_size"
        " eval_batch_size micro_batch_size per_gpu_batch_size max_num_seqs"
    ),
    "epochs": "epochs num_epochs n_epochs nepochs num_train_epochs max_epochs epoch_count train_epochs",
    "steps": "steps max_steps num_steps n_steps train_steps num_train_steps max_iters iters iterations n_iter"
    " num_iterations max_iterations total_steps num_inference_steps",
    "items": "items num_samples n_samples samples max_samples num_examples n_examples max_train_samples n_items"
    " num_items num_rows dataset_size",
    "sequence_length": "sequence_length seq_length seq_len max_length max_seq_length max_seq_len block_size"
    " context_length n_ctx max_model_len model_max_length max_position_embeddings max_source_length",
    "devices": "device devices gpus n_gpus num_gpus ngpu ngpus nproc_per_node world_size num_devices device_map"
    " tensor_parallel_size accelerator",
    "precision": "dtype torch_dtype precision mixed_precision compute_dtype param_dtype",
    "model": "model model_name model_name_or_path model_id model_path model_type pretrained"
    " pretrained_model_name_or_path checkpoint arch backbone base_model",
    "data": "dataset dataset_name data_path data_dir data_file train_file dataset_path dataset_id train_data csv_path",
    "task": "task task_name task_type",
}
FIELD_BY_NAME = {name: field for field, names in NAMES_BY_FIELD.items() for name in names.split()}
_NEEDS_TEXT = ("dataset", "model", "task", "data")

PRECISIONS = {
    "float16": "float16", "half": "float16", "fp16": "float16", "16": "float16", "16-mixed": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "bf16-mixed": "bfloat16", "float32": "float32", "float": "float32",
    "fp32": "float32", "32": "float32", "float64": "float64", "double": "float64", "int8": "int8", "8bit": "int8",
    "int4": "int4", "4bit": "int4", "float8_e4m3fn": "float8", "fp8": "float8",
}  # fmt: skip

TASK_OF_CLASS = {
    "ForCausalLM": "text-generation", "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification", "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering", "ForSeq2SeqLM": "text2text-generation",
    "ForConditionalGeneration": "text2text-generation", "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification", "ForObjectDetection": "object-detection",
    "ForSpeechSeq2Seq": "automatic-speech-recognition", "ForCTC": "automatic-speech-recognition",
    "ForVision2Seq": "image-to-text", "ForImageTextToText": "image-text-to-text",
    "DiffusionPipeline": "text-to-image", "CrossEncoder": "text-ranking", "SentenceTransformer": "feature-extraction",
}  # fmt: skip
"""ML task by the ending of a class name."""

TASK_OF_CALL = {
    "generate": ("text-generation", 0.5), "encode_plus": ("feature-extraction", 0.3),
    "label_scores": ("text-classification", 0.5), "embed": ("feature-extraction", 0.5),
    "classify": ("classification", 0.4), "predict_proba": ("classification", 0.5),
    "CrossEntropyLoss": ("classification", 0.35), "MSELoss": ("regression", 0.35),
    "Conv2d": ("image-classification", 0.3), "TransformerEncoderLayer": ("sequence-modelling", 0.3),
    "LSTM": ("sequence-modelling", 0.3), "GRU": ("sequence-modelling", 0.3), "causal_lm": ("text-generation", 0.9),
    "encoder": ("feature-extraction", 0.9),
}  # fmt: skip

FRAMEWORKS = {
    "vllm": ("vllm", 0.95), "transformers": ("transformers", 0.9),
    "sentence_transformers": ("sentence-transformers", 0.95),
    "diffusers": ("diffusers", 0.95), "pytorch_lightning": ("lightning", 0.93), "lightning": ("lightning", 0.93),
    "torch": ("pytorch", 0.85), "torchvision": ("pytorch", 0.8), "tensorflow": ("tensorflow", 0.9),
    "keras": ("keras", 0.85), "jax": ("jax", 0.88), "flax": ("jax", 0.88), "sklearn": ("scikit-learn", 0.8),
    "xgboost": ("xgboost", 0.85), "lightgbm": ("lightgbm", 0.85), "stoker": ("stoker", 0.5), "numpy": ("numpy", 0.4),
}  # fmt: skip

_MODEL_WORDS = (
    "pretrained_model_name_or_path", "model_name_or_path", "model_name", "model_id", "path", "model", "name",
)  # fmt: skip
_MODEL = ("model", 0, _MODEL_WORDS, 0.9)
_DATA = ("data", 0, ("path", "filepath_or_buffer"), 0.5)
_ARGUMENTS: dict[str, tuple[tuple[str, int, tuple[str, ...], float], ...]] = {
    "from_pretrained": (("model", 0, _MODEL_WORDS, 0.95),),
    "pipeline": (("task", 0, ("task",), 0.95), ("model", 1, ("model",), 0.95)),
    "torch.hub.load": (("model", 1, ("model",), 0.9),),
    **dict.fromkeys(("SentenceTransformer", "CrossEncoder", "LLM", "create_model", "get_model"), (_MODEL,)),
    **dict.fromkeys(("causal_lm", "encoder"), (("model", 0, _MODEL_WORDS, 0.95),)),
    **dict.fromkeys(("read_csv", "read_parquet", "read_json", "loadtxt", "genfromtxt", "load_from_disk"), (_DATA,)),
    **dict.fromkeys(("memmap", "numpy.load", "torch.load"), (_DATA,)),
}
"""By function, arguments that contain facts: the fact's field, argument position, argument names, certainty."""
_NAMED_BY_CALL = {
    "torchvision.models.": ("model", 0.9), "keras.applications.": ("model", 0.9),
    "torchvision.datasets.": ("data", 0.85), "sklearn.datasets.": ("data", 0.85),
}  # fmt: skip
"""Modules whose functions are named after models or datasets."""

MOST_FURTHER = 40
_HELPERS = ("Tokenizer", "Processor", "Config", "FeatureExtractor")
_DATA_FILES = (".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".npy", ".npz")
_SLICE = re.compile(r"\[:(\d+)\]")
_CUDA = re.compile(r"(cuda|cpu|mps|xpu|auto|gpu|tpu)(:\d+)?$")
_SIZED = re.compile(
    r"(config|model|layer|net|encoder|decoder|args|block|linear|conv|lstm|gru|embedding|classifier)", re.I
)


class FactRecogniser:
    """Collects the most certain fact for each field."""

    def __init__(self) -> None:
        self.found: dict[str, SourceFact] = {}
        self.further: dict[str, SourceFact] = {}
        self._loops = 0

    def record_call(self, site: CallSite) -> None:
        owner, _, last = site.dotted.rpartition(".")
        top = site.dotted.partition(".")[0]
        self.record_framework_of_module(top, site.sure)
        for field, place, names, sure in _ARGUMENTS.get(site.dotted) or _ARGUMENTS.get(last, ()):
            value = site.find_argument(place, *names)
            if value is not None and isinstance(value.value, str):
                factor = 0.6 if owner.endswith(_HELPERS) else 1.0
                self.record_fact(field, value.value, factor * sure * site.sure * value.sure)
        for prefix, (field, sure) in _NAMED_BY_CALL.items():
            if site.dotted.startswith(prefix):
                self.record_fact(field, last, sure * site.sure)
        if top == "sklearn" and last[:1].isupper():
            self.record_fact("model", last, 0.7 * site.sure)
            for ending, task in (("Classifier", "classification"), ("Regressor", "regression")):
                if last.endswith(ending):
                    self.record_fact("task", task, 0.6)
        if last == "load_dataset":
            self._record_dataset(site)
        self._record_precision_of_call(site)
        if last == "cuda" and owner:
            self.record_fact("devices", "cuda", 0.85 * site.sure)
        elif last in ("to", "device") and site.args and site.args[0] is not None:
            self._record_device(site.args[0], 0.85 * site.sure)
        self._record_task_of_call(site, owner, last)
        sized = _SIZED.search(last) is not None
        for name, value in site.kwargs.items():
            if name not in _NEEDS_TEXT or value is None or isinstance(value.value, str):
                self.record_named_value(name, value, factor=0.85 * site.sure, records_other_names=sized)
        if sized and last[:1].isupper():
            numbers = [value for value in site.args if value is not None and type(value.value) is int]
            for place, value in enumerate(numbers[:3], start=1):
                self._record_further_fact(f"{last} {place}", value)

    def record_named_value(
        self, name: str, value: KnownValue | None, *, factor: float, records_other_names: bool = False
    ) -> None:
        if value is None:
            return
        field = FIELD_BY_NAME.get(name.lower().lstrip("_"))
        if field == "precision":
            self._record_precision(value, factor)
        elif field == "devices":
            self._record_device(value, factor)
        elif field is not None:
            self.record_fact(field, value.value, factor * value.sure)
        elif records_other_names:
            self._record_further_fact(name, value)

    def record_loop(self, name: str, times: KnownValue) -> None:
        word = name.lower()
        if "epoch" in word:
            self.record_fact("epochs", times.value, 0.85 * times.sure)
        elif "step" in word or "iter" in word:
            self.record_fact("steps", times.value, 0.8 * times.sure)
        else:
            self._loops += 1
            self._record_further_fact(f"loop {self._loops}", times)

    def record_framework_of_module(self, top: str, sure: float) -> None:
        if top in FRAMEWORKS:
            framework, certainty = FRAMEWORKS[top]
            self.record_fact("framework", framework, certainty * sure)

    def record_opened_file(self, file: NamedFile, sure: float) -> None:
        if os.path.splitext(file.path)[1] in _DATA_FILES:
            self.record_fact("data", file.path, 0.45 * sure)

    def _record_dataset(self, site: CallSite) -> None:
        name, part, split = site.find_argument(0, "path"), site.find_argument(1, "name"), site.kwargs.get("split")
        if name is not None and isinstance(name.value, str):
            full = f"{name.value}/{part.value}" if part is not None and isinstance(part.value, str) else name.value
            self.record_fact("data", full, 0.95 * site.sure * name.sure)
        if split is not None and (sliced := _SLICE.search(str(split.value))):
            self.record_fact("items", int(sliced[1][:12]), 0.85 * site.sure)

    def _record_precision_of_call(self, site: CallSite) -> None:
        if site.last in ("half", "bfloat16", "double") and not site.args and "." in site.dotted:
            self._record_precision(KnownValue(site.last), 0.85 * site.sure)
        elif site.last in ("to", "type", "astype", "set_default_dtype", "autocast"):
            for value in site.args:
                if value is not None and isinstance(value.value, ImportedName):
                    self._record_precision(value, 0.8 * site.sure)
        for name in ("fp16", "bf16", "load_in_8bit", "load_in_4bit"):
            value = site.kwargs.get(name)
            if value is not None and value.value is True:
                self._record_precision(KnownValue(name.removeprefix("load_in_")), 0.9 * site.sure)

    def _record_precision(self, value: KnownValue, sure: float) -> None:
        said = value.value.last if isinstance(value.value, ImportedName) else value.value
        precision = PRECISIONS.get(str(said).lower())
        if precision is not None and isinstance(said, str | int):
            self.record_fact("precision", precision, sure * value.sure)

    def _record_device(self, value: KnownValue, sure: float) -> None:
        device = value.value
        if isinstance(device, str):
            device = device.partition(":")[0] if _CUDA.match(device) else None
        if isinstance(device, str | int):
            self.record_fact("devices", device, sure * value.sure)

    def _record_task_of_call(self, site: CallSite, owner: str, last: str) -> None:
        if last in TASK_OF_CALL:
            task, certainty = TASK_OF_CALL[last]
            self.record_fact("task", task, certainty * site.sure)
        if site.dotted.startswith(("torchvision.models.", "keras.applications.")):
            self.record_fact("task", "image-classification", 0.6 * site.sure)
        made = owner if last == "from_pretrained" else last
        for ending, task in TASK_OF_CLASS.items():
            if made.endswith(ending):
                self.record_fact("task", task, 0.9 * site.sure)
        if last in ("backward", "fit", "train_step") or site.dotted.endswith("Trainer.train"):
            self._record_further_fact("training", KnownValue("yes"))

    def record_fact(self, field: str, value: Any, sure: float) -> None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str):
            value = value.strip()
        sure, before = round(min(sure, 1.0), 3), self.found.get(field)
        if is_valid_value(field, value) and (before is None or sure > before.sure):
            self.found[field] = SourceFact(value, sure)

    def _record_further_fact(self, name: str, value: KnownValue) -> None:
        known = value.value
        if isinstance(known, bool):
            known = "yes" if known else "no"
        small = isinstance(known, int | float) and abs(known) < 1e15
        short = isinstance(known, str) and 0 < len(known) <= 80
        if (small or short) and name not in self.further and len(self.further) < MOST_FURTHER:
            self.further[name] = SourceFact(known, round(value.sure, 3))
