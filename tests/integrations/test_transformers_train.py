"""Trainer on our models: evaluation, checkpoints, resuming, several processes; pipelines over what it trained."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

from tests.integrations import images, language

LAUNCHED, ROOT = "tests.integrations.launched", Path(__file__).parents[2]


def text_examples(count):
    rows = language.prompts(count, 8)
    return [{"input_ids": row, "labels": row} for row in rows]


def image_examples(count):
    pictures = images.images("crate")[torch.arange(count) % 2]
    return [{"pixel_values": picture, "labels": torch.tensor(i % 2)} for i, picture in enumerate(pictures)]


KINDS = {"crate_lm": (language, text_examples), "tost_lm": (language, text_examples), "crate": (images, image_examples)}


def accuracy(predicted):
    return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}


def trainer(family, folder, steps, **options):
    module, examples = KINDS[family]
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    model = module.wrapped(module.pair(family)[0], family)
    return Trainer(
        model,
        arguments,
        train_dataset=examples(6),
        eval_dataset=examples(4),
        compute_metrics=accuracy if family == "crate" else None,
    )


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("crate", "tost_lm")), "crate_lm"]
)
def test_a_resumed_run_is_the_whole_run(family, tmp_path):
    whole = trainer(family, tmp_path / "whole", 4)
    whole.train()
    losses = [row["eval_loss"] for row in whole.state.log_history if "eval_loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    if family == "crate":
        assert any("eval_accuracy" in row for row in whole.state.log_history)
    first = trainer(family, tmp_path / "parts", 2)
    first.train()
    rest = trainer(family, tmp_path / "parts", 4)
    rest.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    for (name, tensor), other in zip(whole.model.state_dict().items(), rest.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_the_best_checkpoint_is_loaded(tmp_path):
    run = trainer("crate", tmp_path, 4, load_best_model_at_end=True)
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-4")
    saved = type(run.model).from_pretrained(run.state.best_model_checkpoint)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name]), name


def test_accumulated_batches_count_tokens(tmp_path):
    """The loss is a mean over the tokens of all accumulated batches, which differ in their number."""
    results = []
    for batch, accumulated in ((2, 1), (1, 2)):
        run = trainer("crate_lm", tmp_path, 1, max_grad_norm=0.0, gradient_accumulation_steps=accumulated)
        run.args.per_device_train_batch_size = run._train_batch_size = batch
        rows = language.prompts(2, 8)
        labels = rows.clone()
        labels[0, 3:] = -100
        run.train_dataset = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
        run.train()
        results.append(run.model.transformer.h[0].ista.weight.detach())
    torch.testing.assert_close(*results)


PROBLEMS = {
    "single_label_classification": lambda i, classes: torch.tensor(i % 2),
    "multi_label_classification": lambda i, classes: (torch.arange(classes) % (i + 2) == 0).float(),
    "regression": lambda i, classes: torch.arange(classes) / (i + 1.0),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_accumulated_batches_of_images_are_one_large_batch(problem, tmp_path):
    """The loss is a mean over images, whatever the problem and their number in a step."""
    weights, losses = [], []
    for batch, steps in ((4, 1), (2, 2), (1, 4)):
        run = trainer("crate", tmp_path, 1, max_grad_norm=0.0, optim="sgd", gradient_accumulation_steps=steps)
        run.args.per_device_train_batch_size = run._train_batch_size = batch
        run.model.config.problem_type = problem
        run.train_dataset = [
            {**example, "labels": PROBLEMS[problem](i, run.model.config.num_labels)}
            for i, example in enumerate(image_examples(4))
        ]
        run.eval_dataset = run.train_dataset
        run.compute_metrics = None
        run.train()
        weights.append(run.model.state_dict())
        losses += [row["loss"] for row in run.state.log_history if "loss" in row]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


@pytest.mark.exhaustive
def test_two_processes_train_as_one(tmp_path):
    """By ``accelerate launch``, on the CPU: gradients are averaged over both.

    Its option for several processes is named after GPUs; the arguments of the Trainer say that there is none.
    """
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    for command, name in (([*launch, "--module"], "two"), (["-m"], "one")):
        subprocess.run([sys.executable, *command, LAUNCHED, tmp_path / f"{name}.json"], check=True, cwd=ROOT)
    two, one = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("two", "one"))
    assert (two.pop("processes"), one.pop("processes")) == (2, 1)
    assert two == pytest.approx(one, rel=1e-5)


def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghi"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=24
    )


@pytest.mark.parametrize("family", ["crate_lm", "tost_lm", "aot_lm"])
def test_text_generation_pipeline(family):
    ours, model = language.pair(family)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    texts = ["a b c d", "e f"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    results = generate(texts, batch_size=2, return_tensors=True, **options)
    rows = [torch.tensor(tokenizer()(text)["input_ids"]) for text in texts]
    for row, expected, result in zip(rows, ours.generate(rows, 6, temperature=0), results, strict=True):
        assert result[0]["generated_token_ids"][-6:] == expected[len(row) :].tolist()


def test_image_classification_pipeline():
    image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install pillow")
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    ours, model = images.pair("crate")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 12})
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    classify = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    result = classify(image.fromarray(pixels), top_k=5)
    normalised = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.5) / 0.5
    expected = ours(normalised[None]).softmax(-1)[0]
    assert [row["label"] for row in result] == [f"LABEL_{i}" for i in expected.argsort(descending=True).tolist()]
    scores = torch.tensor([row["score"] for row in result])
    torch.testing.assert_close(scores, expected.sort(descending=True).values, rtol=1e-4, atol=1e-6)
