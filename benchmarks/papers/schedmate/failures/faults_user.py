"""Fault types of programs: mistakes in code, data and settings, and more memory asked for than there is.

All but the device's memory really happen when the code runs.
"""

from __future__ import annotations

from benchmarks.papers.schedmate.failures.injections import LINEAR, TORCH_ONLY, USER, FaultType, coded, killed, raised

_OOM = (
    "CUDA out of memory. Tried to allocate 3.91 GiB. GPU {gpu} has a total capacity of 39.39 GiB of which 1.87 GiB "
    "is free. "
    "Including non-PyTorch memory, this process has 37.50 GiB memory in use. Of the allocated memory 35.72 GiB is "
    "allocated "
    "by PyTorch, and 1.21 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)

TYPES = (
    FaultType("key_error_in_data", USER, "code", (
        coded("data", "record = {'text': 'a b', 'id': step}\nreturn record['text'], record['label']"),
        coded("data", "columns = {'image_path': 0, 'target': 1}\nreturn columns[f'label_{step % 3}']"),
    )),
    FaultType("shape_mismatch", USER, "code", (
        coded("compute", "hidden = torch.randn(8, 64)\nreturn torch.nn.Linear(128, 10)(hidden)", only=TORCH_ONLY),
        coded("compute", "return torch.randn(4, 3, 8) + torch.randn(4, 5, 8)", only=TORCH_ONLY),
        coded("compute", "import numpy as np\nreturn np.ones((3, 4)) @ np.ones((3, 4))"),
    )),
    FaultType("index_out_of_range", USER, "code", (
        coded("data", "batch = list(range(7))\nreturn batch[step]"),
        coded("compute", "table = torch.nn.Embedding(100, 8)\nreturn table(torch.tensor([5, 100]))", only=TORCH_ONLY),
    )),
    FaultType("label_out_of_bounds", USER, "code", (
        coded("compute", "return torch.nn.functional.cross_entropy(torch.randn(2, 10), torch.tensor([3, 12]))",
            only=TORCH_ONLY),
    )),
    FaultType("missing_module", USER, "code", (
        coded("start", "import einops_contrib.layers as layers\nreturn layers"),
        coded("start", "from utils.augmentations import RandAugmentV2\nreturn RandAugmentV2"),
    )),
    FaultType("type_error", USER, "code", (
        coded("compute", "def criterion(logits, target): return 0\nreturn criterion(1, target=2, label_smoothing=0.1)"),
        coded("data", "name = None\nreturn 'train/' + name"),
    )),
    FaultType("attribute_error", USER, "code", (
        coded("compute", "class Model: pass\nreturn Model().encoder"),
        coded("data", "tokens = None\nreturn tokens.split()"),
    )),
    FaultType("name_error", USER, "code", (
        coded("compute", "return learning_rate * 2"),
        coded("save", "return os_path_join('a', 'b')"),
    )),
    FaultType("zero_division", USER, "code", (
        coded("save", "seen = []\nreturn sum(seen) / len(seen)"),
    )),
    FaultType("nan_loss", USER, "data", (
        coded("compute", "loss = torch.tensor(float('nan'))\nif torch.isnan(loss): raise FloatingPointError(f'Loss "
            "is {loss} at "
              "step {step}, stopping training')", only=TORCH_ONLY),
        coded("compute", "with torch.autograd.detect_anomaly():\n    x = torch.zeros(1, requires_grad=True)\n"
              "    (torch.sqrt(x - x) * 0).backward()", only=TORCH_ONLY),
        coded("compute", "import numpy as np\nvalues = np.array([1.0, np.nan])\nassert not np.isnan(values).any(), "
            "'input contains NaN'"),
    )),
    FaultType("bad_config", USER, "config", (
        coded("start", "import argparse\nparser = "
            "argparse.ArgumentParser(prog='train.py')\nparser.add_argument('--lr', type=float)\n"
              "return parser.parse_args(['--lr', '1e-4x'])"),
        coded("start", "config = {'optim': {'lr': 0.1}}\nreturn config['optim']['weight_decay']"),
        coded("start", "raise ValueError(\"config.model.num_layers must be divisible by pipeline_parallel_size (30 "
            "% 4 != 0)\")"),
    )),
    FaultType("bad_json", USER, "data", (
        coded("data", "import json\nreturn json.loads('{\"text\": \"unfinished')"),
        coded("start", "import json\nreturn json.loads('{lr: 1}')"),
    )),
    FaultType("file_not_found", USER, "code", (
        coded("data", "return open(f'/data/imagenet_subset/shard-{step:05d}.tar', 'rb')"),
        coded("save", "return open('checkpoints/run_final_v2/model.pt', 'wb')"),
    )),
    FaultType("permission_denied", USER, "code", (
        coded("save", "raise PermissionError(13, 'Permission denied', '/projects/shared/models/best.pt')"),
    )),
    FaultType("cuda_oom_own", USER, "gpu_memory", (
        raised("compute", f"torch.OutOfMemoryError|{_OOM}", *LINEAR, only=TORCH_ONLY),
        raised("compute", f"torch.OutOfMemoryError|{_OOM}", "transformers/models/llama/modeling_llama.py", "forward",
               "attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling", only=TORCH_ONLY),
    )),
    FaultType("host_memory_own", USER, "memory", (
        killed("slurmstepd: error: Detected 1 oom_kill event in StepId={job}.0. Some of the step tasks have been "
            "OOM Killed.",
               "srun: error: {host}: task {rank}: Out Of Memory"),
        killed("[{clock}] Memory cgroup out of memory: Killed process {pid} (python) total-vm:98214312kB, "
            "anon-rss:66912340kB, "
               "file-rss:70244kB, shmem-rss:0kB, UID:1042 pgtables:140212kB oom_score_adj:0",
               "slurmstepd: error: Detected 1 oom_kill event in StepId={job}.batch. Some of the step tasks have "
               "been OOM Killed."),
        coded("data", "import numpy as np\nreturn np.zeros((1 << 30, 1 << 14), dtype=np.float64)"),
    )),
    FaultType("state_dict_keys", USER, "code", (
        coded("start", "a, b = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))\nreturn "
            "b.load_state_dict(a.state_dict())", only=TORCH_ONLY),
    )),
    FaultType("backward_twice", USER, "code", (
        coded("compute", "x = torch.ones(3, requires_grad=True)\ny = (x * x).sum()\ny.backward()\ny.backward()",
            only=TORCH_ONLY),
        coded("compute", "x = torch.ones(3)\n(x * 2).sum().backward()", only=TORCH_ONLY),
    )),
    FaultType("dtype_mismatch", USER, "code", (
        coded("compute", "return torch.nn.Linear(4, 4)(torch.ones(2, 4, dtype=torch.float64))", only=TORCH_ONLY),
        coded("compute", "return torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2, dtype=torch.int64))",
            only=TORCH_ONLY),
    )),
    FaultType("tokenizer_error", USER, "data", (
        coded("data", "from tokenizers import Tokenizer, models\nreturn Tokenizer(models.WordLevel({'a': 0}, "
            "unk_token='[UNK]')).encode(None)",
              only="language"),
        coded("data", "from transformers import AutoTokenizer\nreturn "
            "AutoTokenizer.from_pretrained('/models/my-tokenizer-v3')", only="language"),
    )),
    FaultType("recursion", USER, "code", (
        coded("data", "def flatten(tree): return flatten([tree])\nreturn flatten([1])"),
    )),
    FaultType("unicode_error", USER, "data", (
        coded("data", "return bytes([0x68, 0xe9, 0x20]).decode('utf-8')"),
    )),
    FaultType("assertion", USER, "code", (
        coded("compute", "world, heads = 3, 8\nassert heads % world == 0, f'num_heads {heads} must be divisible by "
            "tensor parallel size {world}'"),
        coded("data", "images, labels = [1, 2, 3], [1, 2]\nassert len(images) == len(labels)"),
    )),
    FaultType("quota", USER, "disk", (
        coded("save", "raise OSError(122, 'Disk quota exceeded', '/home/{user}/runs/last/optimizer.pt')"),
        raised("save", "OSError:122:/home/{user}/.cache/huggingface/hub/tmp3x", "shutil.py", "copyfileobj",
            "fdst_write(buf)"),
    )),
    FaultType("device_assert", USER, "code", (
        raised("compute", "torch.AcceleratorError|CUDA error: device-side assert triggered\nCUDA kernel errors "
            "might be asynchronously "
               "reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging "
               "consider passing "
               "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n", *LINEAR,
               "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [14,0,0], "
               "thread: [32,0,0] "
               "Assertion `srcIndex < srcSelectDimSize` failed.", only=TORCH_ONLY),
    )),
    FaultType("gated_model", USER, "network", (
        raised("start", "OSError|You are trying to access a gated repo.\nMake sure to have access to it at "
               "https://huggingface.co/meta-llama/Llama-2-7b-hf.\n401 Client Error. (Request ID: "
               "Root=1-66;8a)\nCannot access gated repo "
               "for url https://huggingface.co/meta-llama/Llama-2-7b-hf/resolve/main/config.json.\nAccess to model "
               "is restricted. You "
               "must have access to it and be authenticated to access it. Please log in.",
               "transformers/utils/hub.py", "cached_files", "raise OSError(", only="language"),
    )),
    FaultType("script_not_there", USER, "code", (
        killed("/var/spool/slurmd/job{job}/slurm_script: line 14: python3.12: command not found", where="start"),
        killed("python: can't open file '/home/{user}/project/train_v2.py': [Errno 2] No such file or directory",
            where="start"),
        killed("/var/spool/slurmd/job{job}/slurm_script: line 9: conda: command not found",
               "/var/spool/slurmd/job{job}/slurm_script: line 10: activate: No such file or directory", where="start"),
    )),
)  # fmt: skip
