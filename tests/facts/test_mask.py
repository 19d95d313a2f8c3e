"""Secrets planted anywhere in a config, a command line or a text are gone from the copy, and nothing harmless is."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import json
import pathlib
import re
import time
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanfold.facts import mask as masking
from fanfold.facts.mask import is_secret, mask, mask_argv, mask_text, mask_traceback
from mask_corpus import ARGUMENTS, DRAWN, HARMLESS, NAMED, SHAPED, TEXTS

SECRET_KEYS = [
    "token", "hub_token", "HF_TOKEN", "accessToken", "api_key", "apikey", "OPENAI_API_KEY", "MyApiKey", "wandb-api-key",
    "ssh_key", "client_secret", "SECRETS", "password", "db_passwd", "PGPASSWORD", "aws_credentials", "Authorization",
    "bearer", "AWS_ACCESS_KEY_ID", "optim/login.token", "smtp_pass", "passphrase", "api_keys", "private key",
]  # fmt: skip
HARMLESS_KEYS = [
    "keys", "key", "monkey", "key_size", "tokenizer", "num_tokens", "max_tokens", "token_count", "tokens", "eos_token",
    "pad_token", "mask_token", "pad_token_id", "keyboard", "attention.key", "public_key", "author", "backward_pass", "PWD",
]  # fmt: skip
SHAPES = [
    "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ",
    "sk-" + "abcdEFGH1234ijklMNOP5678",
    "sk-proj-" + "ab_cd-EF_gh-12_34-ij_kl-MN",
    "sk-ant-api03-" + "ab-cd_EF12gh34ij56kl78",
    "ghp_" + "0123456789abcdefghijABCDEFGHIJ456789",
    "github_pat_" + "11ABCDEFG0123456789_abcdefghij",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "xoxb-" + "123456789012-abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0" + ".dozjgNryP4J3jVmNHl0w5N",
    "glpat-" + "abcdefghij0123456789",
]


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_secret_key_hides_its_value(key: str) -> None:
    assert is_secret(key)
    assert mask({"a": [{key: "hun7erX2q"}]}) == {"a": [{key: "***"}]}
    assert mask("hun7erX2q", key) == "***"


@pytest.mark.parametrize("key", HARMLESS_KEYS)
def test_harmless_key_keeps_its_value(key: str) -> None:
    assert mask({key: "gpt2"}) == {key: "gpt2"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_tokens": 4096, "pad_token_id": 0, "eval_token": 7}, {"max_tokens": 4096, "pad_token_id": 0, "eval_token": 7}),
        ({"password": 1234, "secret_pin": 1.5, "api_key": 99}, {"password": "***", "secret_pin": 1.5, "api_key": "***"}),
        ({"use_auth_token": True, "hub_token": None}, {"use_auth_token": True, "hub_token": None}),
        ({"token": "", "secrets": []}, {"token": "", "secrets": []}),
        ({"credentials": {"user": "u", "n": [1]}}, {"credentials": "***"}),
        ({"password": b"bytes"}, {"password": "***"}),
    ],
)
def test_numbers_bools_and_nothing_are_no_secrets_unless_the_name_is_plain(config: object, expected: object) -> None:
    assert mask(config) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SECRET = st.text(alphabet="abcdefXYZ0189!#$%-_.~", min_size=6, max_size=40).map(lambda tail: f"Zq9x7K{tail}")


@given(
    secret=SECRET,
    key=st.sampled_from(SECRET_KEYS),
    path=st.lists(st.sampled_from(["dict", "list", "tuple"]), max_size=12),
    leaf=st.sampled_from(["plain", "list", "dict", "tuple", "bytes", "key"]),
    beside=JSON,
)
def test_secret_planted_under_a_secret_key_at_any_depth_never_shows(
    secret: str, key: str, path: list[str], leaf: str, beside: object
) -> None:
    planted: dict[str, object] = {
        "plain": secret, "list": ["a", secret], "dict": {"x": {"y": secret}}, "tuple": ((secret,),),
        "bytes": secret.encode(), "key": {secret: 1},
    }  # fmt: skip
    value: object = {"beside": beside, key: planted[leaf]}
    for kind in path:
        value = {"dict": {"inner": value, "b": beside}, "list": [beside, value], "tuple": (value, 1)}[kind]
    before = copy.deepcopy(value)
    masked = mask(value)
    assert secret not in repr(masked)
    assert "***" in repr(masked)
    assert value == before
    json.dumps(masked)


@given(JSON)
def test_masking_twice_changes_nothing_more(value: object) -> None:
    once = mask(value)
    assert mask(once) == once


@given(st.text())
def test_any_text_is_taken_and_keeps_its_lines(text: str) -> None:
    for code in (True, False):
        assert mask_text(text, code=code).count("\n") == text.count("\n")


@given(
    user=st.from_regex(r"[a-z]{0,8}", fullmatch=True),
    password=st.from_regex(r"[A-Z0-9@:!$&'*+,;=%._~-]{5,20}", fullmatch=True),
)
def test_url_password_goes_and_user_and_host_stay(user: str, password: str) -> None:
    masked = mask(f"see postgresql+asyncpg://{user}:Pw7{password}@db.example.org:5432/runs now")
    assert masked == f"see postgresql+asyncpg://{user}:***@db.example.org:5432/runs now"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://localhost:8080/a@b", "http://localhost:8080/a@b"),
        ("http://[::1]:80/x", "http://[::1]:80/x"),
        ("mysql://me:a/b@db/x", "mysql://me:***@db/x"),
        ("https://0123456789abcdef0123456789abcdef@github.com/a/b", "https://***@github.com/a/b"),
        ("https://h/x?token=abc&page=2&api_key=zz#top", "https://h/x?token=***&page=2&api_key=***#top"),
        ("https://h/x?sig=a%2Fb&se=2026", "https://h/x?sig=***&se=2026"),
        ("curl -H 'Authorization: Basic dXNlcjpw' h", "curl -H 'Authorization: ***' h"),
        ("host=db password=hunter2 user=me", "host=db password=*** user=me"),
        ("AccountName=a;AccountKey=abc==;x=y", "AccountName=a;AccountKey=***;x=y"),
        ('{"api_key": "a\\"b", "user": "me"}', '{"api_key": "***", "user": "me"}'),
        ("run.py --api-key abc --lr 3", "run.py --api-key *** --lr 3"),
        ("sk-learn-random-forest-baseline", "sk-learn-random-forest-baseline"),
        ("task-abcdefgh12345678abcdefgh", "task-abcdefgh12345678abcdefgh"),
        ("commit " + "0a" * 20, "commit " + "0a" * 20),
        ("max_tokens=4096 api_key=None token=12", "max_tokens=4096 api_key=None token=12"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
         "-----BEGIN RSA PRIVATE KEY-----\n***\n-----END RSA PRIVATE KEY-----"),
    ],
)  # fmt: skip
def test_secrets_inside_a_text(text: str, expected: str) -> None:
    assert mask(text) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_known_token_shapes_are_found_anywhere(shape: str) -> None:
    assert mask({"note": f"use ({shape}), please"}) == {"note": "use (***), please"}
    assert mask({shape: 1}) == {"***": 1}


def test_forty_hex_digits_are_a_key_only_where_wandb_is_named() -> None:
    digits = "0123456789abcdef" * 2 + "01234567"
    assert mask({"wandb": digits, "commit": digits}) == {"wandb": "***", "commit": digits}
    assert mask_text(f"wandb.login(key='{digits}')", code=True) == "wandb.login(key='***')"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("token = args.token", "token = args.token"),
        ("f(api_key=key, token=tokens[0])", "f(api_key=key, token=tokens[0])"),
        ("def f(token: str = 'a1b2c3d4'): ...", "def f(token: str = '***'): ..."),
        ("def f(token: str = 'abc'): ...", "def f(token: str = 'abc'): ..."),
        ('os.environ["HF_TOKEN"] = "abc"', 'os.environ["HF_TOKEN"] = "***"'),
        ('os.environ.setdefault("HF_TOKEN", "abc")', 'os.environ.setdefault("HF_TOKEN", "***")'),
        ('connect("host=h password=abc")', 'connect("host=h password=***")'),
        ('"source": ["token = \\"a1b2c3d4\\"\\n"]', '"source": ["token = \\"***\\"\\n"]'),
        ('password = (\n+    "abc"\n+)', 'password = (\n+    "***"\n+)'),
        ('api_keys = [\n+    "abc",\n+    "def",\n+]', "api_keys = ***\n+***\n+***\n+***"),
        ('secret = """\nabc\n"""\nx = 1', 'secret = """\n***\n"""\nx = 1'),
        ('class Token:\n    """A unit of text."""', 'class Token:\n    """A unit of text."""'),
        ('names = ["token", "epoch"]', 'names = ["token", "epoch"]'),
    ],
)
def test_code_hides_literals_and_keeps_expressions(code: str, expected: str) -> None:
    assert mask_text(code, code=True) == expected


def test_command_line() -> None:
    argv = ["python", "train.py", "--api-key", "X1", "--hub_token=X2 X3", "-p", "8", "WANDB_API_KEY=X4 X4&X4", "--lr", "0.1",
            "+model.token=X5y6Z7", "--use-token", "--epochs", "3", "--url", "https://u:X6@h", "--tokenizer", "gpt2",
            '--config={"password": "X7"}', "--password"]  # fmt: skip
    before = list(argv)
    assert mask_argv(argv) == [
        "python", "train.py", "--api-key", "***", "--hub_token=***", "-p", "8", "WANDB_API_KEY=***", "--lr", "0.1",
        "+model.token=***", "--use-token", "--epochs", "3", "--url", "https://u:***@h", "--tokenizer", "gpt2",
        '--config={"password": "***"}', "--password",
    ]  # fmt: skip
    assert argv == before


def test_arguments_and_pairs_inside_a_config() -> None:
    config = {
        "command": ["run", "--api-key", "X", "--token=Y", "--end-token", "end"],
        "env": [{"name": "HF_TOKEN", "value": "X"}, {"name": "LR", "value": "3"}],
        "headers": [("Authorization", "X"), ("Accept", "json")],
    }
    assert mask(config) == {
        "command": ["run", "--api-key", "***", "--token=***", "--end-token", "end"],
        "env": [{"name": "HF_TOKEN", "value": "***"}, {"name": "LR", "value": "3"}],
        "headers": [["Authorization", "***"], ["Accept", "json"]],
    }


@dataclasses.dataclass
class Arguments:
    hub_token: str
    lr: float


class Pair(typing.NamedTuple):
    password: str
    size: int


class Mode(str, enum.Enum):
    FAST = "fast"


def test_objects_with_named_parts_become_dicts() -> None:
    value = {"a": Arguments("X", 0.1), "p": Pair("X", 2), "n": argparse.Namespace(api_key="X", lr=1), "m": Mode.FAST,
             "path": pathlib.PurePosixPath("/data"), "s": {3}, "b": b"12", 5: 6}  # fmt: skip
    assert mask(value) == {
        "a": {"hub_token": "***", "lr": 0.1}, "p": {"password": "***", "size": 2}, "n": {"api_key": "***", "lr": 1},
        "m": "fast", "path": "/data", "s": [3], "b": "<2 bytes>", "5": 6,
    }  # fmt: skip


def test_numpy_and_torch_values_are_put_into_plain_words() -> None:
    import numpy as np

    torch = pytest.importorskip("torch")  # the other Pythons, where this file runs too, are set up without it
    masked = mask({"n": np.int64(3), "f": np.float32(0.5), "a": np.zeros((2, 3)), "t": torch.zeros(4), "d": torch.float16})
    assert masked == {"n": 3, "f": 0.5, "a": "<ndarray [2, 3]>", "t": "<Tensor [4]>", "d": "torch.float16"}


def test_a_config_that_holds_itself_ends() -> None:
    config: dict[str, object] = {"lr": 1}
    config["self"] = config
    assert mask(config) == {"lr": 1, "self": "…"}


def test_an_object_that_cannot_be_read_costs_only_itself() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert mask({"x": Broken(), "lr": 1}) == {
        "x": "<test_an_object_that_cannot_be_read_costs_only_itself.<locals>.Broken>",
        "lr": 1,
    }


def test_text_that_cannot_be_encoded_becomes_text_that_can() -> None:
    masked = mask({"path": "bad\udcff"})
    assert masked == {"path": "bad?"}


@pytest.mark.parametrize(
    "text",
    [
        "://",
        "://a:",
        "token=[",
        'token="',
        "sk-",
        "eyJ",
        "--token ",
        "'''",
        "a:b@",
        "password: ",
        "--auth a:",
        "machine a ",
        "ghp_",
        "Q~",
        "1:AA",
        "-----BEGIN PRIVATE KEY-----",
        "login x password ",
        "a/b/",
        "AKIA",
        "xoxb-1-",
        "jina_",
        "EAA",
        "re_",
        "a-b_",
        "ab_" + "x1" * 10 + "-",
    ],
)
def test_long_hostile_text_takes_time_in_proportion(text: str) -> None:
    started = time.perf_counter()
    mask_text(text * (400_000 // len(text)))
    assert time.perf_counter() - started < 8  # what grows with the square takes minutes here


def test_the_corpus_is_large_enough() -> None:
    assert len(SHAPED) + len(NAMED) + len(TEXTS) + len(ARGUMENTS) >= 100
    assert len(HARMLESS) >= 200


@pytest.mark.parametrize("secret", SHAPED)
def test_tokens_of_a_published_form_are_hidden_everywhere(secret: str) -> None:
    assert mask({"note": secret}) == {"note": "***"}
    assert secret not in mask_text(f"Error 401 for {secret}: denied")
    assert secret not in mask_text(f'client = Client("{secret}")', code=True)
    assert secret not in mask_traceback(f'  File "a.py", line 1\n    connect("{secret}")\nAuthError: {secret} is expired\n')
    assert secret not in repr(mask_argv(["train.py", "--x", secret, f"--y={secret}"]))


@pytest.mark.parametrize("secret", DRAWN)
def test_tokens_of_no_published_form_are_hidden_by_how_they_look(secret: str) -> None:
    drawn = "q7Xk2Vb9Tn4Lm8Rc1Zd6Wf"
    assert drawn in secret
    for text in (f"Error 401 for {secret}: denied", f'client = Client("{secret}")', f"--y={secret}", secret):
        assert drawn not in mask_text(text)
    assert drawn not in repr(mask({"note": secret, "list": [secret]}))
    assert drawn not in repr(mask_argv(["train.py", "--x", secret]))


@pytest.mark.parametrize(("key", "secret"), NAMED)
def test_values_under_the_name_of_a_secret_are_hidden(key: str, secret: str) -> None:
    assert mask({"deep": [{key: secret}]}) == {"deep": [{key: "***"}]}


@pytest.mark.parametrize(("text", "secret"), TEXTS)
def test_secrets_within_texts_are_hidden(text: str, secret: str) -> None:
    masked = mask_text(text)
    assert secret not in masked
    assert "***" in masked
    assert secret not in mask_traceback(f'  File "a.py", line 1\n    f()\nRuntimeError: {text}\n')


@pytest.mark.parametrize(("argv", "secret"), ARGUMENTS)
def test_secrets_in_arguments_are_hidden(argv: list[str], secret: str) -> None:
    assert secret not in repr(mask_argv(["train.py", *argv, "--lr", "0.1"]))
    assert mask_argv(["train.py", *argv, "--lr", "0.1"])[-2:] == ["--lr", "0.1"]


@pytest.mark.parametrize(("key", "value"), HARMLESS)
def test_harmless_values_stay(key: str, value: object) -> None:
    assert mask({key: value}) == {key: value}
    if isinstance(value, str) and value and key != "text":
        assert mask_argv([f"--{key}", value]) == [f"--{key}", value] or is_secret(f"--{key}")


@given(st.one_of(st.from_regex(re.compile(rule.pattern)) for rule in (masking._STRONG, masking._WEAK)))
def test_every_name_that_a_rule_matches_contains_one_of_the_words_looked_for_first(name: str) -> None:
    assert any(word in name for word in masking._WORDS)
