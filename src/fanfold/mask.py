"""Secrets never reach a journal: configs, environments, command lines and patches pass through here first.

A run directory is copied, shared and uploaded, so a secret is replaced before it is written, not when it is shown.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from .errors import guard

MASKED = "***"
DEPTH = 100  # deeper than any config, shallower than Python's own recursion limit
CHUNK = 65_536  # one regex call holds the GIL, so long texts are searched in pieces of a few milliseconds

_SEPARATORS = str.maketrans("- /", "__.")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_STRONG = re.compile(
    r"secret|passw(?:or)?d|passphrase|credential|_pwd$|(?:db|user|smtp|ssh|proxy|admin|root)_?pass$"
    r"|(?:^|[_.])(?:authorization|bearer|cookie|basic_auth)$"
    r"|(?:api|access|auth|private|account|ssh|signing|encryption)_?keys?(?:_id)?$"
)
_WEAK = re.compile(r"(?:^|[_.])token$|_key$|(?:api|access|auth|refresh|bearer|hub|hf)_?tokens?$")
# Words of a tokenizer and of a database, which a config is full of.
_HARMLESS = re.compile(
    r"(?:^|[_.])(?:bos|eos|pad|unk|sep|cls|mask|stop|special|image|audio|video)_token$"
    r"|(?:^|[_.])(?:public|primary|foreign|sort)_key$"
)


def is_secret(key: str) -> bool:
    """Tell whether a key, option or variable of this name holds a secret."""
    return _level(key) > 0


def mask(value: object, key: str | None = None) -> object:
    """Copy `value` as plain JSON-like data, with every secret replaced by `***`; the input is not changed.

    Under a secret name (`is_secret`, any depth) everything that is not empty is replaced, except that None and bools
    stay always, and numbers stay unless the name is one of the plain ones (password, secret, credential, api_key,
    authorization…): `pad_token_id: 0` and `eval_token: 4096` are sizes, `password: 1234` is not. Strings anywhere are
    searched as `mask_text` does. Tuples and sets become lists, dataclasses and namespaces become dicts, other objects
    their text.
    """
    return _mask(value, key or "", ())


def mask_argv(argv: Sequence[str]) -> list[str]:
    """Copy a command line with secrets replaced: `--api-key X`, `--api-key=X`, `NAME_TOKEN=X`, and any in the text.

    Short options are not known by name: `-p X` stays.
    """
    return [str(word) for word in _sequence([_word(str(word)) for word in argv], "", ())]


def _level(key: str) -> int:
    """Rate a name: 0 harmless, 1 secret when it is text (`hub_token`), 2 secret whatever it is (`password`)."""
    name = _HUMPS.sub("_", key).translate(_SEPARATORS).lower()
    if _STRONG.search(name):
        return 2
    return 1 if _WEAK.search(name) and not _HARMLESS.search(name) else 0


def _mask(value: object, key: str, parents: tuple[int, ...]) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _mask(value.value, key, parents)
    if isinstance(value, numbers.Real):
        return MASKED if _level(key) > 1 else _number(value)
    if _level(key) and not _empty(value):
        return MASKED
    if isinstance(value, str):
        return _string(value, key)
    return _container(value, key, parents)


def _number(value: numbers.Real) -> object:
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _empty(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict | set | frozenset) and not value


def _string(value: str, key: str) -> str:
    # str.__str__ undoes subclasses; a lone surrogate cannot be encoded, so it would make the whole frame unwritable.
    text = mask_text(str.__str__(value))
    if "wandb" in key.lower():
        text = _HEX40.sub(MASKED, text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _container(value: object, key: str, parents: tuple[int, ...]) -> object:
    if id(value) in parents or len(parents) >= DEPTH:
        return "…"
    copy: object = f"<{type(value).__qualname__}>"
    with guard("read a value of the configuration"):
        copy = _read(value, key, (*parents, id(value)))
    return copy  # noqa: RET504 - guard swallows, so the first value may still stand


def _read(value: object, key: str, parents: tuple[int, ...]) -> object:
    pairs = _pairs(value)
    if pairs is not None:
        return _mapping(dict(pairs), parents)
    if isinstance(value, list | tuple | AbstractSet):
        return _sequence(value, key, parents)
    return _string(_text(value), key)


def _pairs(value: object) -> Iterable[tuple[object, object]] | None:
    """Read what has named parts as pairs, so that the names can tell what is secret."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":  # argparse's, not imported for it
        return vars(value).items()
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif isinstance(value, tuple):
        names = list(getattr(kind, "_fields", ()))
    else:  # attrs, pydantic
        names = [a.name for a in getattr(kind, "__attrs_attrs__", ())] or list(getattr(kind, "model_fields", ()))
    return [(name, getattr(value, name, None)) for name in names] or None


def _text(value: object) -> str:
    """Put any other object into words, without waiting for a device to print its numbers."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    shape = getattr(value, "shape", None)
    if shape is not None and shape != () and hasattr(value, "dtype"):
        return f"<{type(value).__qualname__} {list(shape)}>"
    return f"<{type(value).__qualname__}>" if hasattr(value, "is_cuda") else str(value)


def _mapping(values: Mapping[object, object], parents: tuple[int, ...]) -> dict[str, object]:
    # {"name": "HF_TOKEN", "value": "…"}: how container specs write an environment.
    label = values.get("name", values.get("key"))
    owner = label if isinstance(label, str) and is_secret(label) else ""
    out: dict[str, object] = {}
    for key, value in values.items():
        name = str.__str__(key) if isinstance(key, str) else str(key)
        out[_string(name, "")] = _mask(value, owner if owner and name == "value" else name, parents)
    return out


def _sequence(values: Iterable[object], key: str, parents: tuple[int, ...]) -> list[object]:
    """Mask each item; after `--api-key`, and in a pair such as ("Authorization", "…"), the first names the second."""
    items = list(values)
    pair = len(items) == 2 and all(isinstance(item, str) for item in items)
    out: list[object] = []
    owner = ""
    for item in items:
        option = isinstance(item, str) and item.startswith("--")
        if isinstance(item, str) and option:
            item = _word(item)  # noqa: PLW2901 - `--api-key=X` inside a config's own list of arguments
        out.append(_mask(item, key if option or not owner else owner, parents))
        names = isinstance(item, str) and "=" not in item and (option or (pair and not out[1:])) and is_secret(item)
        owner = str(item) if names else ""
    return out


def _word(word: str) -> str:
    """Mask all that follows `NAME_TOKEN=` in one word of a command line, spaces included."""
    name, equals, value = word.partition("=")
    return f"{name}={MASKED}" if equals and value and _NAME.fullmatch(name) and is_secret(name) else word


_NAME = re.compile(r"[-+~]{0,2}[\w./@-]+")
_HEX40 = re.compile(r"\b[0-9a-f]{40}\b")
# `wandb.login(key="…")`: forty hex digits are a git commit everywhere else.
_WANDB = re.compile(r"(wandb[^\n]{0,80}?)\b[0-9a-f]{40}\b")
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# The password runs to the last @ of the authority; one with a bare / in it is taken too, unless it is a port.
_URL = re.compile(r'(://[^\s/?#:@"<>\[]*:)(?:[^\s/?#"<>]*|(?!\d{1,5}[/?#])[^\s"<>@]{0,200})@')
_URL_USER = re.compile(r"(://)[\w-]{20,}(?=(?::\*\*\*)?@)")
_SIGNED = re.compile(r"([?&](?:[sS]ig|(?:[xX]-(?:Amz|Goog|amz|goog)-)?[sS]ignature)=)[^&\s#\"'<>]+")
_BEARER = re.compile(r"((?:Bearer|bearer|BEARER)\s{1,4})[\w.~+/=-]{16,}")
_SHAPES = (
    ("hf_", r"[A-Za-z0-9]{20,}"),
    ("api_org_", r"[A-Za-z0-9]{20,}"),
    ("sk-", r"(?:(?:ant|proj|or|svcacct|admin|lf)-[\w-]{16,}|(?=[\w-]{0,80}?[A-Za-z0-9]{16})[\w-]{16,})"),
    ("sk_live_", r"\w{16,}"),
    ("ghp_", r"\w{20,}"),
    ("gho_", r"\w{20,}"),
    ("ghu_", r"\w{20,}"),
    ("ghs_", r"\w{20,}"),
    ("ghr_", r"\w{20,}"),
    ("github_pat_", r"\w{20,}"),
    ("glpat-", r"[\w-]{16,}"),
    ("AKIA", r"[A-Z0-9]{16}\b"),
    ("ASIA", r"[A-Z0-9]{16}\b"),
    ("AIza", r"[\w-]{35}"),
    ("xox", r"[abeoprs]-[\w-]{10,}"),
    ("hooks.slack.com/services/", r"[\w/]{16,}"),
    ("eyJ", r"[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
    ("wandb_v1_", r"\w{20,}"),
    ("nvapi-", r"[\w-]{20,}"),
    ("gsk_", r"[A-Za-z0-9]{20,}"),
    ("r8_", r"[A-Za-z0-9]{30,}"),
    ("npm_", r"[A-Za-z0-9]{30,}"),
    ("pypi-", r"[\w-]{40,}"),
    ("dckr_pat_", r"[\w-]{20,}"),
)


def mask_text(text: str, *, code: bool = False) -> str:
    """Replace the secrets inside a text: URL passwords, known token shapes, private keys, and `name = value` pairs.

    In `code`, only literals in quotes are values: `token = args.token` tells nothing and stays. Line breaks stay
    where they are, so a patch keeps its line counts.
    """
    if "PRIVATE KEY-----" in text:
        text = _PEM.sub(lambda m: m[1] + _blank(text[m.end(1) : m.start(2)]) + m[2], text)
    text = "".join(map(_shapes, _chunks(text)))
    return _pairs_in(text, code=code)


def _chunks(text: str) -> Iterator[str]:
    """Cut at line ends, which no token crosses."""
    start = 0
    while len(text) - start > CHUNK:
        end = text.find("\n", start + CHUNK) + 1 or len(text)
        yield text[start:end]
        start = end
    yield text[start:]


def _shapes(text: str) -> str:
    if "://" in text:
        text = _URL.sub(rf"\g<1>{MASKED}@", text)
        text = _URL_USER.sub(rf"\g<1>{MASKED}", text)
        text = _SIGNED.sub(rf"\g<1>{MASKED}", text)
    if "wandb" in text:
        text = _WANDB.sub(rf"\g<1>{MASKED}", text)
    if "earer" in text or "EARER" in text:
        text = _BEARER.sub(rf"\g<1>{MASKED}", text)
    for start, rest in _SHAPES:
        if start in text:
            text = _shape(start, rest).sub(MASKED, text)
    return text


@functools.cache  # compiled when first seen: all of them at import would cost milliseconds
def _shape(start: str, rest: str) -> re.Pattern[str]:
    # The literal comes first and the look-behind after it: the search then runs at the speed of str.find.
    return re.compile(f"{re.escape(start)}(?<![A-Za-z0-9]{re.escape(start)}){rest}")


def _blank(text: str) -> str:
    """Replace each line, keeping the line breaks and a patch's own first column."""
    first, *rest = text.split("\n")
    lines = [(line[0] if line[:1] in {"+", "-", " "} else "") + (MASKED if line else "") for line in rest]
    return "\n".join([MASKED if first else "", *lines])


# A cheap net for the tail of every secret name; the whole name is read leftwards and judged by `_level`. The first
# letter stands alone so that the search can skip to it.
_TAIL = re.compile(r"[tkspcabTKSPCAB](?i:oken|ey|ecret|ass|wd|redential|ookie|earer|uth)[\w-]{0,40}(?=[\\\"'\]\s:=])")
_QUOTE = r"\\{0,3}[\"']"
_OPENING = rf"(?=[rbfuRBFU]{{0,2}}{_QUOTE})"
_EQUALS = re.compile(
    rf"(?:{_QUOTE})?\]?[ \t]{{0,8}}(?:"
    rf":[ \t]{{0,4}}[\w.\[\]| ]{{1,40}}?=[\s(+-]{{0,24}}{_OPENING}"  # name: str = "…"
    r"|(?:=>|:?={1,2})[\s(+-]{0,24}|:[ \t]{0,8})"
    rf"|{_QUOTE}\s{{0,8}}(?P<comma>,)[\s+-]{{0,24}}{_OPENING}"  # setenv("NAME", "…")
)
_SPACE = re.compile(r"[ \t]+(?:\\\n[-+ ]?[ \t]*)?(?!-)")
_LONG = re.compile(r"[rbfuRBFU]{0,2}(?P<quote>\"{3}|'{3})(?P<body>.{0,4000}?)(?:(?P=quote)|\Z)", re.DOTALL)
_LITERAL = re.compile(rf"[rbfuRBFU]{{0,2}}(?P<quote>{_QUOTE})(?P<body>(?:(?!(?P=quote))(?:\\[^\n]|[^\\\n]))*)(?:(?P=quote))?")
_GROUP = re.compile(r"\[[^\]]{0,4000}\]?|\{[^}]{0,4000}\}?")
_BARE = re.compile(r"[|>][-+]?[ \t]*\n[^\n]*|(?:(?i:bearer|basic|token|digest)[ \t]+)?(?:[^\s&;\"'<>]|[\"'](?=\w))+")
_PLAIN = re.compile(r"(?i:none|null|nil|true|false)[,)\]}]*|\*\*\*.*")
_NUMERIC = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?[,)\]}]*")


def _pairs_in(text: str, *, code: bool) -> str:
    out: list[str] = []
    done = at = 0
    while at < len(text):
        tail = _TAIL.search(text, at, at + CHUNK)
        if tail is None:
            at += CHUNK - 64  # a name may lie across the cut
            continue
        at = tail.end()
        start = _name_start(text, tail.start())
        span = _value(text, start, at, code=code)
        if span is not None:
            out += text[done : span[0]], _blank(text[slice(*span)])
            done = at = span[1]
    return "".join([*out, text[done:]]) if out else text


def _name_start(text: str, at: int) -> int:
    least = max(0, at - 64)
    while at > least and (text[at - 1].isalnum() or text[at - 1] in "_-."):
        at -= 1
    return at


def _value(text: str, start: int, end: int, *, code: bool) -> tuple[int, int] | None:
    """Find the span of what the name at `start:end` hides, or None where it hides nothing."""
    level = _level(text[start:end])
    equals = _equals(text, start, end) if level else None
    if equals is None:
        return None
    at = equals.end()
    if literal := _LONG.match(text, at) or _LITERAL.match(text, at):
        return None if literal["body"] in {"", MASKED} else literal.span("body")
    outside = code and (equals[0][:1] in {'"', "'"} or not _in_quotes(text, start))
    if group := _GROUP.match(text, at):
        worth = not code or '"' in group[0] or "'" in group[0]
        return group.span() if worth and len(group[0]) > 2 else None
    bare = None if outside else _BARE.match(text, at)
    if bare is None or _PLAIN.fullmatch(bare[0]) or (level == 1 and _NUMERIC.fullmatch(bare[0])):
        return None
    return bare.span()


def _equals(text: str, start: int, end: int) -> re.Match[str] | None:
    """Find what joins a name to its value: `=`, `:`, a comma between quotes, or the space after an option."""
    equals = _EQUALS.match(text, end)
    if equals is None and text.startswith("--", start):
        return _SPACE.match(text, end)
    if equals and equals["comma"] and not (text.startswith("--", start) or text[start - 2 : start] in {'("', "('"}):
        return None  # a word of a list or a sentence; a name is an option, or the first argument of a call
    return equals


def _in_quotes(text: str, at: int) -> bool:
    line = text[max(text.rfind("\n", 0, at) + 1, at - 1000) : at]
    return line.count('"') % 2 == 1 or line.count("'") % 2 == 1
