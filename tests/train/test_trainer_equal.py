"""Our Trainer beside Transformers' own: the same seed and arguments give the same weights and logs, to the bit."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fanfold  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels=None):
        guess = self.body(x).squeeze(-1)
        return {"loss": (guess - labels).square().mean(), "guess": guess}


def dataset(count=22):
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
    return [{"x": row, "labels": row.sum().sin()} for row in rows]


def options(folder, **more):
    return {"output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.01,
            "num_train_epochs": 2, "logging_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none",
            **more}  # fmt: skip


def both(folder, *, train=None, evaluation=None, make=Net, **more):
    """Make our Trainer and theirs, from the same model, data and arguments."""
    torch.manual_seed(7)
    model = make()
    given = {"train_dataset": train if train is not None else dataset(), "eval_dataset": evaluation}
    ours = lambda: fanfold.Trainer(  # noqa: E731
        copy.deepcopy(model),
        fanfold.TrainingArguments(**options(folder / "ours", logging_last_step=False, **more)),
        run=False,
        **given,
    )
    theirs = lambda: transformers.Trainer(  # noqa: E731
        copy.deepcopy(model),
        transformers.TrainingArguments(**options(folder / "theirs", dataloader_pin_memory=False, **more)),
        **given,
    )
    return ours, theirs


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def train_both(folder, times=1, **more):
    trained = []
    for make in both(folder, **more):
        trainer = make()
        for _ in range(times):
            trainer.train()
        trained.append(trainer)
    return trained


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 3, "weight_decay": 0.1, "warmup_steps": 2},
        {"data_seed": 5, "seed": 9},
        {"max_grad_norm": 0.0},
        {"eval_strategy": "steps", "eval_steps": 3, "evaluation": dataset(6)},
        {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "max_steps": 17},
        {"train_sampling_strategy": "sequential"},
    ],
    ids=lambda given: ", ".join(given) or "defaults",
)
def test_the_weights_are_equal_to_the_bit_with_shuffling_and_dropout(given, tmp_path, capsys):
    ours, theirs = train_both(tmp_path, **given)
    assert torch.equal(weights(ours), weights(theirs))
    for key in ("learning_rate", "grad_norm"):
        assert logged(ours, key) == logged(theirs, key)
        assert len(logged(ours, key)) > 2
    assert logged(ours, "eval_loss") == pytest.approx(logged(theirs, "eval_loss"), rel=1e-6)


def test_a_second_training_continues_as_it_does_there(tmp_path, capsys):
    ours, theirs = train_both(tmp_path, times=2)
    assert torch.equal(weights(ours), weights(theirs))
    assert ours.state.global_step == theirs.state.global_step == 22


@pytest.mark.parametrize("step", [4, 11], ids=["mid-epoch", "end of an epoch"])
def test_a_resumed_training_ends_as_it_does_there(step, tmp_path, capsys):
    found = []
    for make in both(tmp_path, save_strategy="steps", save_steps=1):
        make().train()
        torch.randn(5)
        again = make()
        again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-{step}")
        found.append(weights(again))
    assert torch.equal(*found)


def test_a_model_init_starts_every_training_from_the_same_model(tmp_path, capsys):
    ours = fanfold.Trainer(
        None, fanfold.TrainingArguments(**options(tmp_path / "ours")), train_dataset=dataset(), model_init=Net, run=False
    )
    theirs = transformers.Trainer(
        None, transformers.TrainingArguments(**options(tmp_path / "theirs", dataloader_pin_memory=False)), train_dataset=dataset(),
        model_init=Net,
    )  # fmt: skip
    for trainer in (ours, theirs):
        torch.randn(3)  # random numbers drawn before training change nothing
        trainer.train()
    assert torch.equal(weights(ours), weights(theirs))
    first = weights(ours).clone()
    ours.train()
    assert torch.equal(weights(ours), first)


def test_a_plateau_lowers_the_learning_rate_as_it_does_there(tmp_path, capsys):
    given = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
             "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "evaluation": dataset(6), "logging_steps": 1}  # fmt: skip
    ours, theirs = train_both(tmp_path, **given)
    assert torch.equal(weights(ours), weights(theirs))
    assert logged(ours, "learning_rate") == logged(theirs, "learning_rate")
    assert min(logged(ours, "learning_rate")) < 0.01
    with pytest.raises(fanfold.SettingError, match="Set eval_strategy"):
        fanfold.TrainingArguments(str(tmp_path), lr_scheduler_type="reduce_lr_on_plateau")


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                     max_position_embeddings=16, num_labels=2)  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def test_floating_point_operations_are_counted_as_they_are_there(tmp_path, capsys):
    rows = torch.randint(0, 50, (12, 7), generator=torch.Generator().manual_seed(2))
    train = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 2} for row in rows]
    found, metrics = [], []
    for make in both(tmp_path, train=train, make=bert, save_strategy="steps", save_steps=6):
        trainer, again = make(), make()
        metrics.append(trainer.train().metrics)
        again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-6")
        found.append((trainer.state.total_flos, again.state.total_flos, weights(trainer)))
    assert found[0][:2] == found[1][:2]
    assert metrics[0]["total_flos"] == found[0][0] == found[0][1] > 0  # there, the printer takes it out of the metrics
    assert torch.equal(found[0][2], found[1][2])


def test_the_default_optimizer_is_theirs(tmp_path):
    mine, other = fanfold.TrainingArguments(str(tmp_path)), transformers.TrainingArguments(str(tmp_path))
    assert mine.optim == other.optim.value


class Stream(torch.utils.data.IterableDataset):
    """Five batches of two: with two to a step, the last step of a pass has one batch."""

    def __iter__(self):
        return iter(dataset(10))


def test_unlike_there_an_odd_batch_at_the_end_of_a_stream_is_a_step_of_its_own(tmp_path, capsys):
    """There its gradients stay and are added to the first step of the next pass."""
    ours, theirs = train_both(tmp_path, train=Stream(), max_steps=6, gradient_accumulation_steps=2, logging_steps=1)
    assert ours.state.global_step == theirs.state.global_step == 6
    assert not torch.equal(weights(ours), weights(theirs))
    sized = train_both(
        tmp_path, train=dataset(10), max_steps=6, gradient_accumulation_steps=2, train_sampling_strategy="sequential"
    )
    assert torch.equal(weights(ours), weights(sized[0]))  # the same as with data of a known length, here and there
    assert torch.equal(weights(ours), weights(sized[1]))
