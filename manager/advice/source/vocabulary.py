"""The words by which sources name what the schema asks for."""

from __future__ import annotations

NAMES = {
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
FIELD_OF = {name: field for field, names in NAMES.items() for name in names.split()}
"""The field that a variable, an option, a keyword or a config's key of this name tells."""

PRECISIONS = {
    "float16": "float16", "half": "float16", "fp16": "float16", "16": "float16", "16-mixed": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "bf16-mixed": "bfloat16", "float32": "float32", "float": "float32",
    "fp32": "float32", "32": "float32", "float64": "float64", "double": "float64", "int8": "int8", "8bit": "int8",
    "int4": "int4", "4bit": "int4", "float8_e4m3fn": "float8", "fp8": "float8",
}  # fmt: skip
"""Precisions by the names that sources give them."""

TASK_OF_CLASS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForSeq2SeqLM": "text2text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "ForCTC": "automatic-speech-recognition",
    "ForVision2Seq": "image-to-text",
    "ForImageTextToText": "image-text-to-text",
    "StableDiffusionPipeline": "text-to-image",
    "DiffusionPipeline": "text-to-image",
    "CrossEncoder": "text-ranking",
    "SentenceTransformer": "feature-extraction",
}
"""The task that the end of a class's name tells."""

TASK_OF_CALL = {
    "generate": ("text-generation", 0.5),
    "encode_plus": ("feature-extraction", 0.3),
    "label_scores": ("text-classification", 0.5),
    "embed": ("feature-extraction", 0.5),
    "classify": ("classification", 0.4),
    "predict_proba": ("classification", 0.5),
    "CrossEntropyLoss": ("classification", 0.35),
    "MSELoss": ("regression", 0.35),
    "Conv2d": ("image-classification", 0.3),
    "TransformerEncoderLayer": ("sequence-modelling", 0.3),
    "LSTM": ("sequence-modelling", 0.3),
    "GRU": ("sequence-modelling", 0.3),
}
"""The task that a method or a layer hints at, and how sure that is."""

FRAMEWORKS = {
    "vllm": ("vllm", 0.95), "transformers": ("transformers", 0.9),
    "sentence_transformers": ("sentence-transformers", 0.95),
    "diffusers": ("diffusers", 0.95), "pytorch_lightning": ("lightning", 0.93), "lightning": ("lightning", 0.93),
    "torch": ("pytorch", 0.85), "torchvision": ("pytorch", 0.8), "tensorflow": ("tensorflow", 0.9),
    "keras": ("keras", 0.85), "jax": ("jax", 0.88), "flax": ("jax", 0.88), "sklearn": ("scikit-learn", 0.8),
    "xgboost": ("xgboost", 0.85), "lightgbm": ("lightgbm", 0.85), "stoker": ("stoker", 0.5), "numpy": ("numpy", 0.4),
}  # fmt: skip
"""The framework that the use of an installed module tells, and how sure that is."""
