"""diffusers draws the same image when its T5 text encoder is the zoo's, split or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardzoo

diffusers = pytest.importorskip("diffusers")

WORDS = 200  # of the T5
CLIP_WORDS = 1000


class Characters:
    """Stands for a tokenizer: an id for each character."""

    model_max_length = 77

    def __init__(self, words: int) -> None:
        self.words = words

    def __call__(self, text: str | list[str], max_length: int = 77, **options: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        rows = []
        for entry in texts:
            ids = [3 + ord(character) % (self.words - 3) for character in entry]
            ids = [*ids[: max_length - 1], 2]
            rows.append(ids + [1] * (max_length - len(ids)))
        ids = torch.tensor(rows)
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": (ids != 1).long()})

    def batch_decode(self, ids: torch.Tensor) -> list[str]:
        return ["" for _ in ids]


def draw(encoder: Any) -> torch.Tensor:
    """Returns the image [1, 32, 32, 3] of a tiny Stable Diffusion 3 with random weights."""
    torch.manual_seed(0)
    denoiser = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    clip_config = transformers.CLIPTextConfig(
        vocab_size=CLIP_WORDS,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    clips = [transformers.CLIPTextModelWithProjection(clip_config) for _ in range(2)]
    autoencoder = diffusers.AutoencoderKL(
        sample_size=32,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=denoiser,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder,
        text_encoder=clips[0],
        tokenizer=Characters(CLIP_WORDS),
        text_encoder_2=clips[1],
        tokenizer_2=Characters(CLIP_WORDS),
        text_encoder_3=encoder,
        tokenizer_3=Characters(WORDS),
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to("cpu")
    result = pipeline(
        "two cats on a mat",
        negative_prompt="a dog",
        num_inference_steps=2,
        height=32,
        width=32,
        output_type="pt",
        generator=torch.Generator().manual_seed(1),
    )
    return result.images


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a T5, whose weights are large enough to matter."""
    path = tmp_path_factory.mktemp("t5")
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4
    )
    torch.manual_seed(2)
    transformers.T5EncoderModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def image(folder) -> torch.Tensor:
    """The image with transformers' encoder."""
    return draw(transformers.T5EncoderModel.from_pretrained(folder))


def test_the_image_depends_on_the_encoder(folder, image):
    encoder = shardzoo.from_pretrained(folder)
    with torch.no_grad():
        encoder.get_parameter("encoder.final_norm.weight").mul_(2)
    assert (draw(encoder) - image).abs().max() > 1e-3


def test_the_image_is_that_of_transformers(folder, image):
    torch.testing.assert_close(draw(shardzoo.from_pretrained(folder)), image, rtol=0, atol=1e-5)


def test_a_text_encoder_split_over_two_processes_draws_the_same_image(folder, image, run_mesh):
    def draw_on_rank(mesh: Any) -> torch.Tensor:
        return draw(shardzoo.from_pretrained(folder, mesh=mesh))

    for drawn in run_mesh(2, draw_on_rank):
        torch.testing.assert_close(drawn, image, rtol=0, atol=1e-5)
