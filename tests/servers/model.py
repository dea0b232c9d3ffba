"""A tiny model with random weights, made on the spot: a Llama of two layers and a tokenizer of the 256 bytes."""

import json
from pathlib import Path

VOCABULARY = 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32: vLLM has no smaller ones on a CPU
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def make(folder: Path) -> Path:
    """Write the model's configuration and tokenizer; the weights are vLLM's, with ``--load-format dummy``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<{number}>" for number in range(len(symbols), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
