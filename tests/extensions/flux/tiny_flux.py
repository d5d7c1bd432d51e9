"""A small Flux, and small encoders with random weights, as transformers and diffusers save them."""

import torch
from cases import words
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("red", "green", "blue", "circle", "square", "a", "above")
WIDTH, POOLED, LENGTH = 16, 12, 10
# Blocks of both kinds. Modulations that are not zero: with zeros most gradients would be 0 at first.
SMALL = tuple(
    words("""
    model=flux_debug model.dim=32 model.n_layers=3 model.ffn_hidden_dim=64
    model.options.axes_dims=[4,2,2] model.options.text_length=8 model.options.context_dim=16
    model.options.pooled_dim=16 model.options.time_dim=16 model.options.zero_init=false
    data=latents_synthetic training.seq_len=24 training.global_batch_size=8 tokenizer=bytes
    cluster.device=cpu metrics.console=none schedule.warmup_steps=0
""")
)


def save_encoders(folder):
    """Save T5, CLIP, their tokenizers and an autoencoder as in a repository of FLUX.1; return the folder."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {
        word: i for i, word in enumerate(WORDS, start=3)
    }
    # CLIP's pooled embedding is that of the largest id.
    end = len(vocabulary)
    vocabulary["<end>"] = end
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=end + 1, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2
        )
    )
    clip = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=end + 1,
            hidden_size=POOLED,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            eos_token_id=end,
        )
    )
    for name, model, last in (("text_encoder_2", t5, "</s>"), ("text_encoder", clip, "<end>")):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        model.save_pretrained(folder / name)
        _tokenizer(vocabulary, last).save_pretrained(
            folder / name.replace("text_encoder", "tokenizer")
        )
    autoencoder = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.36,
        shift_factor=0.12,
    )
    autoencoder.save_pretrained(folder / "vae")
    return folder


def _tokenizer(vocabulary, last):
    import transformers

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {last}", special_tokens=[(last, vocabulary[last])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=last, model_max_length=LENGTH
    )


def overrides(folder):
    """Overrides of a job that uses the encoders."""
    return (
        f"data.options.autoencoder={folder / 'vae'}",
        *(
            "data.options.text=t5_clip",
            f"data.options.text_length={LENGTH}",
            "data.options.dtype=float32",
        ),
        f"data.options.t5={folder / 'text_encoder_2'}",
        f"data.options.clip={folder / 'text_encoder'}",
    )
