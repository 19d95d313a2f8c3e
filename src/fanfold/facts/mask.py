"""Secret masking: configs, environments, command lines and patches are masked here before they reach a journal.

A run directory is copied, shared and uploaded, so secrets are replaced before they are written, not when they are shown.
"""

from __future__ import annotations

import enum
import functools
import itertools
import numbers
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

from ..errors import guard

MASKED = "***"
DEPTH = 100  # deeper than any config, shallower than Python's own recursion limit
CHUNK = 65_536  # one regex call holds the GIL, so long texts are searched in pieces of a few milliseconds


def _pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a regular expression compiled on first use: compiling all of them would take a large part of the first init()."""
    return cast("re.Pattern[str]", _Pattern(text, flags))


class _Pattern:
    def __init__(self, text: str, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, found)  # from now on without this method
        return found


SHORT = 1000  # characters up to which a few plain searches are cheaper than a pattern that need not be compiled then
_SEPARATORS = str.maketrans("- /", "__.")
_HUMPS = _pattern(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_VENDORS = (
    "hf|hub|hugging_?face|git_?hub|git_?lab|slack|discord|telegram|wandb|comet|neptune|clearml|swanlab|dagshub|mlflow|openai|anthropic"
    "|cohere|aws|azure|gcp|google|npm|pypi|docker|registry|vault|sentry|databricks|replicate|pinecone|kaggle"
)
# Names of secrets, whatever the value looks like: a password may be any word.
_STRONG = _pattern(
    r"(?:passw(?:or)?d|passphrase|secrets?|credentials?|apikeys?)(?:_?\d+)?$|(?:^|[_.])pwd$"
    r"|(?:db|user|smtp|ssh|proxy|admin|root|ftp|mail|imap|sql|redis|postgres)_?pass$"
    r"|(?:^|[_.])(?:authorization|bearer|cookie|basic_auth)$"
    r"|(?:api|access|auth|private|account|ssh|signing|encryption|secret)_?keys?(?:_id)?$"
    rf"|(?:{_VENDORS}|api|access|auth|refresh|bearer|session|security|oauth|deploy|write|bot)_?tokens?$"
)
# Names of secrets only if the value looks like one: `license_key`, `login.token`, `password_hash`.
_WEAK = _pattern(
    r"(?:^|[_.])(?:token|pass|pwd|pw|auth|pin)$"
    rf"|(?:{_VENDORS}|license|master|session|client|service|server|shared|storage|subscription|hmac|jwt|aes|webhook|deploy)_?key$"
    r"|(?:^|[_.])(?:secret|password|passwd|credential)s?[_.]"
)
# Every name that either of these matches contains one of these words.
_WORDS = ("pass", "secret", "credential", "key", "pwd", "pw", "auth", "bearer", "cookie", "token", "pin")
# Common words of tokenizers and databases, which configs are full of.
_HARMLESS = _pattern(
    r"(?:^|[_.])(?:bos|eos|bot|eot|pad|unk|sep|cls|mask|stop|start|begin|end|first|last|next|new|prev|special|image|audio|video|vision|"
    r"fim|prefix|suffix|middle|prompt|system|user|assistant|tool|think|sentinel|fill|boundary|newline|class|per|extra|control|image_pad)"
    r"_token$|(?:^|[_.])(?:public|primary|foreign|sort)_key$"
)
_OPTIONS = frozenset(("--pass", "--pw", "--pwd", "--token", "--auth-token"))
# Values that reveal nothing, even under `password`: a switch, a placeholder, the name of a variable.
_NOTHING = _pattern(
    r"(?i:none|null|nil|true|false|yes|no|on|off|auto|default|env|prompt|required|optional|basic|disabled)|\*+|"
    r"<[^<>]*>|\[[^\[\]]*\]|\$\w+|\$?\{[^{}]*\}|\$?\{\{[^{}]*\}\}|env[:.]\w+|os\.environ.*"
)
_PATH = _pattern(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\][\w./\\ -]*|[\w./-]+\.(?:json|ya?ml|toml|pem|key|txt|pub|crt|env)")
_NAME_WITH_SLASHES = _pattern(r"[\w.-]+(?:/[\w.-]{1,24})+")  # meta-llama/Llama-3-8B
_FILES = _pattern(r"(?:credentials?|secrets|(?:private|ssh|signing|encryption)_?keys?|cookie)$")  # often the path of a file
_PWD = _pattern(r"(?:^|\.)pwd$")  # a password or the working directory: the latter if the value begins like a path
_BEGINS_AS_PATH = _pattern(r"[/\\~.$`]|[A-Za-z]:[/\\]")
_MADE_BY_HAND = _pattern(r"(?:[A-Za-z]+|\d{1,4}|[A-Za-z]+\d{1,2}|\d{1,3}[A-Za-z]{1,2})?")
_USER_AND_PASSWORD = _pattern(r"[^\s:/]+:[^\s:/][^\s/]*")


def is_secret(key: str) -> bool:
    """Return whether a key, option or variable of this name may contain a secret."""
    return _level(key) > 0


def mask(value: object, key: str | None = None) -> object:
    """Return a copy of `value` as plain JSON-like data, with every secret replaced by `***`.

    Strings are first searched for known token formats, wherever they occur (`mask_text`). Under the name of a secret
    (password, client_secret, api_key, hub_token, Authorization…) numbers are replaced, and every text except switches,
    placeholders and file paths. Under a name that may be one (token, license_key…) a text is replaced only if it looks random:
    `text_key`, `pad_token` and `eval_token: 4096` stay. None and bools always stay. Tuples and sets become lists, dataclasses
    and namespaces become dicts, other objects their text.
    """
    return _mask(value, key or "", ())


def mask_argv(argv: Sequence[str]) -> list[str]:
    """Mask secrets in a command line: `--api-key X`, `--pass=X`, `--auth user:X`, `NAME_TOKEN=X`, and any inside its words.

    Short options other than `-u user:X` are not recognised: `-p X` stays.
    """
    return [str(word) for word in _sequence([_word(str(word)) for word in argv], "", ())]


@functools.lru_cache(maxsize=4096)
def _level(key: str) -> int:
    """Rate a name: 0 harmless, 1 secret if the value looks like one (`login.token`), 2 secret (`password`)."""
    folded = key.lower()
    if not any(word in folded for word in _WORDS):
        return 0
    name = _HUMPS.sub("_", key).translate(_SEPARATORS).lower()
    if (_STRONG.search(name) and key != "PWD") or key in _OPTIONS:  # PWD is the shell's working directory
        return 2
    if _HARMLESS.search(name) or not _WEAK.search(name):
        return 0
    return 2 if key.isupper() and name.endswith("_token") else 1  # MY_TOKEN: an environment variable


def _hides(text: str, key: str) -> bool:
    """Return whether a text is a secret, given its name."""
    level = _level(key)
    if not level or not text or _NOTHING.fullmatch(text):
        return False
    if _PWD.search(key.lower()) and _BEGINS_AS_PATH.match(text):
        return False
    if level > 1:
        return not (_FILES.search(key.lower()) and _PATH.fullmatch(text))  # for other names a slash is part of the secret
    if key.lower().endswith("auth") and _USER_AND_PASSWORD.fullmatch(text):
        return True
    return _looks_random(text)


def _looks_random(text: str) -> bool:
    """Return whether a text looks generated: letters and digits mixed, or long and in mixed case."""
    if not 6 <= len(text) <= 10_000 or any(map(str.isspace, text)) or text[0] in "<[{$%/~.":
        return False
    if _PATH.fullmatch(text) or _NAME_WITH_SLASHES.fullmatch(text):
        return False
    if all(map(_MADE_BY_HAND.fullmatch, re.split(r"[-_.:/=+]", text[:200]))):  # end_of_text, llama3-8b, 2024-05-13
        return len(text) >= 24 and text.isalnum() and not text.islower() and not text.isupper() and not text.istitle()
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def _mask(value: object, key: str, parents: tuple[int, ...]) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _mask(value.value, key, parents)
    if isinstance(value, numbers.Real):
        return MASKED if _level(key) > 1 and not key.endswith(("s", "S")) else _number(value)
    if isinstance(value, str):
        return _string(value, key)
    if isinstance(value, bytes | bytearray) and _level(key) and value:
        return MASKED
    if _level(key) > 1 and not _empty(value) and not isinstance(value, os.PathLike):
        return MASKED
    return _container(value, key, parents)


def _number(value: numbers.Real) -> object:
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _empty(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict | set | frozenset) and not value


def _string(value: str, key: str) -> str:
    # str.__str__ undoes subclasses; a lone surrogate cannot be encoded and would make the whole frame unwritable.
    text = str.__str__(value)
    if _hides(text, key):
        return MASKED
    text = mask_text(text)
    if any(vendor in key.lower() for vendor in _HEX_NAMES):
        text = _HEX40.sub(MASKED, text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _container(value: object, key: str, parents: tuple[int, ...]) -> object:
    if id(value) in parents or len(parents) >= DEPTH:
        return "…"
    copy: object = f"<{type(value).__qualname__}>"
    with guard("read a value of the configuration"):
        copy = _read(value, key, (*parents, id(value)))
    return copy  # noqa: RET504 - guard swallows errors, so the first value may still be set


def _read(value: object, key: str, parents: tuple[int, ...]) -> object:
    pairs = _pairs(value)
    if pairs is not None:
        return _mapping(dict(pairs), key, parents)
    if isinstance(value, list | tuple | AbstractSet):
        return _sequence(value, key, parents)
    return _string(_text(value), key)


def _pairs(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the named parts of an object as pairs, so that the names can show what is secret."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":  # argparse's, without importing it
        return vars(value).items()
    kind = type(value)
    if hasattr(kind, "__dataclass_fields__"):
        import dataclasses

        names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # it has the attribute
    elif isinstance(value, tuple):
        names = list(getattr(kind, "_fields", ()))
    else:  # attrs, pydantic
        names = [a.name for a in getattr(kind, "__attrs_attrs__", ())] or list(getattr(kind, "model_fields", ()))
    return [(name, getattr(value, name, None)) for name in names] or None


def _text(value: object) -> str:
    """Return any other object as text, without waiting for a device to print its values."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    shape = getattr(value, "shape", None)
    if shape is not None and shape != () and hasattr(value, "dtype"):
        return f"<{type(value).__qualname__} {list(shape)}>"
    return f"<{type(value).__qualname__}>" if hasattr(value, "is_cuda") else str(value)


def _mapping(values: Mapping[object, object], key: str, parents: tuple[int, ...]) -> dict[str, object]:
    # {"name": "HF_TOKEN", "value": "…"}: the environment in container specs.
    label = values.get("name", values.get("key"))
    owner = label if isinstance(label, str) and is_secret(label) else ""
    inherited = key if _level(key) else ""
    out: dict[str, object] = {}
    for part, value in values.items():
        name = str.__str__(part) if isinstance(part, str) else str(part)
        own = owner if owner and name == "value" else name
        out[_string(name, inherited)] = _mask(value, own if _level(own) or not inherited else inherited, parents)
    return out


def _sequence(values: Iterable[object], key: str, parents: tuple[int, ...]) -> list[object]:
    """Mask each item; after `--api-key`, and in a pair such as ("Authorization", "…"), the first item names the second."""
    items = list(values)
    pair = len(items) == 2 and all(isinstance(item, str) for item in items)
    out: list[object] = []
    owner = ""
    for item in items:
        word = item if isinstance(item, str) else ""
        option = word.startswith("--")
        out.append(_mask(_word(word) if option else item, key if option or not owner else owner, parents))
        names = word and "=" not in word and (option or (pair and not out[1:])) and is_secret(word)
        owner = word if names else "auth" if word in ("-u", "--user") else ""
    return out


def _word(word: str) -> str:
    """Mask everything after `NAME_TOKEN=` in one word of a command line, including spaces."""
    name, equals, value = word.partition("=")
    return f"{name}={MASKED}" if equals and _NAME.fullmatch(name) and _hides(value, name) else word


_NAME = _pattern(r"[-+~]{0,2}[\w./@-]+")
_HEX40 = _pattern(r"\b[0-9a-f]{40}\b")
_HEX_NAMES = ("wandb", "dagshub", "cohere")
# `wandb.login(key="…")`: anywhere else, forty hex digits are a git commit.
_WANDB = _pattern(r"(wandb[^\n]{0,80}?)\b[0-9a-f]{40}\b")
_PEM = _pattern(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# The password extends to the last @ of the authority; one with a bare / is included too, unless it is a port.
_URL = _pattern(r'(://[^\s/?#:@"<>\[]*:)(?:[^\s/?#"<>]*|(?!\d{1,5}[/?#])[^\s"<>@]{0,200})@')
_URL_USER = _pattern(r"(://)[\w-]{20,}(?=(?::\*\*\*)?@)")
_SIGNED = _pattern(
    r"([?&](?:[sS]ig|(?:[xX]-(?:Amz|Goog|amz|goog)-)?[sS]ignature|(?:write_|access_|auth_)?token|(?:api_)?key|code)=)[^&\s#\"'<>]+"
)
# ~/.netrc and git's credential helpers.
_NETRC = _pattern(r"((?:machine|login|account)\s{1,20}\S{1,200}\s{1,20}password\s{1,20})\S+")
_PW = _pattern(r"(--pw(?:[ \t]{1,20}|=))[^\s-]\S*")
_BASIC = _pattern(r"((?:\s-u|--user|--auth)[ \t=]{1,20}[^\s:'\"/]{1,64}:)(?!\d+(?:\s|$)|//)[^\s'\"]+")
_AZURE = _pattern(r"(?<![\w~.-])[\w.-]{3}\dQ~[\w~.-]{31,34}(?![\w~.-])")
_TELEGRAM = _pattern(r"(?:(?<![\w:])|(?<=/bot))\d{8,10}:AA[\w-]{30,40}(?![\w-])")
# Discord bots: their number in base64, a time and a signature. Base64 of digits uses few letters, so no other text matches.
_DISCORD = _pattern(
    r"[MNO](?<![\w.-].)[DTjz][AEIMQUYcgk][w-z0-5](?:[MNO][DTjz][AEIMQUYcgk][w-z0-5]){4,5}\w{0,3}\.[\w-]{6}\.[\w-]{27,45}(?![\w-])"
)
_BEARER = _pattern(r"((?:Bearer|bearer|BEARER)\s{1,4})[\w.~+/=-]{16,}")
# Published token formats: a fixed prefix, and what follows it.
_MIXED = r"(?=[\w+/=-]{0,60}?[A-Z])(?=[\w+/=-]{0,60}?\d)"  # names made of words and underscores may have the same prefix
_UUID = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
_SHAPES = (
    ("hf_", r"[A-Za-z0-9]{20,}"),
    ("api_org_", r"[A-Za-z0-9]{20,}"),
    ("sk-", r"(?=[A-Za-z_-]{0,60}\d)(?:(?:ant|proj|or|svcacct|admin|lf)-[\w-]{16,}|(?=[\w-]{0,80}?[A-Za-z0-9]{16})[\w-]{16,})"),
    ("pk-lf-", r"[\w-]{16,}"),
    ("sk_live_", r"\w{16,}"),
    ("sk_test_", r"\w{16,}"),
    ("rk_live_", r"\w{16,}"),
    ("rk_test_", r"\w{16,}"),
    ("whsec_", r"[\w+/=]{20,}"),
    ("ghp_", r"\w{20,}"),
    ("gho_", r"\w{20,}"),
    ("ghu_", r"\w{20,}"),
    ("ghs_", r"\w{20,}"),
    ("ghr_", r"\w{20,}"),
    ("github_pat_", r"\w{20,}"),
    ("glpat-", r"[\w-]{16,}"),
    ("gldt-", r"[\w-]{16,}"),
    ("glrt-", r"[\w-]{16,}"),
    ("glptt-", r"[\w-]{16,}"),
    ("glft-", r"[\w-]{16,}"),
    ("glcbt-", r"[\w-]{16,}"),
    ("glsoat-", r"[\w-]{16,}"),
    ("AKIA", r"[A-Z0-9]{16}\b"),
    ("ASIA", r"[A-Z0-9]{16}\b"),
    ("ABIA", r"[A-Z0-9]{16}\b"),
    ("ACCA", r"[A-Z0-9]{16}\b"),
    ("AIza", r"[\w-]{35}"),
    ("ya29.", r"[\w-]{20,}"),
    ("GOCSPX-", r"[\w-]{20,}"),
    ("LTAI", r"[A-Za-z0-9]{16,24}\b"),
    ("AKID", r"[A-Za-z0-9]{32}\b"),
    ("xox", r"[abeoprs](?:\.xox[bp])?-[\w-]{10,}"),
    ("xapp-", r"\d-[\w-]{20,}"),
    ("hooks.slack.com/services/", r"[\w/]{16,}"),
    ("discord.com/api/webhooks/", r"\d+/[\w-]{20,}"),
    ("webhook.office.com/", r"[\w@/-]{30,}"),
    ("eyJ", r"[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
    ("eyJhcGlf", r"[\w+/=-]{20,}"),
    ("wandb_v1_", r"\w{20,}"),
    ("local-", r"[0-9a-f]{40}\b"),
    ("nvapi-", r"[\w-]{20,}"),
    ("gsk_", r"[A-Za-z0-9]{20,}"),
    ("r8_", r"[A-Za-z0-9]{30,}"),
    ("pplx-", r"[A-Za-z0-9]{30,}"),
    ("xai-", r"[A-Za-z0-9]{30,}"),
    ("tgp_v1_", r"[\w-]{20,}"),
    ("fw_", r"[A-Za-z0-9]{20,}\b"),
    ("pcsk_", _MIXED + r"\w{20,}"),
    ("lsv2_", r"[ps][tk]_\w{20,}"),
    ("tvly-", r"[\w-]{20,}"),
    ("jina_", _MIXED + r"\w{30,}"),
    ("rpa_", r"[A-Z0-9]{20,}"),
    ("csk-", r"[a-z0-9]{30,}"),
    ("npm_", r"[A-Za-z0-9]{30,}"),
    ("pypi-", r"[\w-]{40,}"),
    ("rubygems_", r"[0-9a-f]{40,}"),
    ("dckr_pat_", r"[\w-]{20,}"),
    ("dckr_oat_", r"[\w-]{20,}"),
    ("dapi", r"[0-9a-f]{32}(?:-\d)?\b"),
    ("dop_v1_", r"[0-9a-f]{40,}"),
    ("hvs.", r"[\w-]{20,}"),
    ("hvb.", r"[\w-]{20,}"),
    ("shpat_", r"[0-9a-fA-F]{32}"),
    ("SG.", r"[\w-]{16,}\.[\w-]{16,}"),
    ("lin_api_", _MIXED + r"\w{30,}"),
    ("ntn_", _MIXED + r"\w{30,}"),
    ("figd_", _MIXED + r"[\w-]{30,}"),
    ("PMAK-", r"[0-9a-f-]{40,}"),
    ("dp.pt.", r"\w{30,}"),
    ("sntrys_", r"[\w+/=]{30,}"),
    ("sntryu_", r"[0-9a-f]{40,}"),
    ("glsa_", _MIXED + r"\w{30,}"),
    ("glc_", _MIXED + r"[\w+/=]{30,}"),
    ("NRAK-", r"[A-Z0-9]{20,}"),
    ("phx_", _MIXED + r"\w{30,}"),
    ("ATATT3", r"[\w=-]{40,}"),
    ("ATBB", r"[\w=]{20,}"),
    ("sgp_", r"[0-9a-f_]{40,}"),
    ("pul-", r"[0-9a-f]{40}"),
    ("sbp_", r"[0-9a-f]{40}"),
    ("tskey-", r"[\w-]{20,}"),
    ("AGE-SECRET-KEY-1", r"[A-Z0-9]{50,}"),
    ("ffk_", r"[\w-]{16,}"),
    ("key-", r"[0-9a-f]{32}\b"),
    ("SK", r"[0-9a-f]{32}\b"),
    ("sk_", r"[0-9a-f]{40,}\b"),
    ("ls__", r"[0-9a-f]{32}\b"),
    ("squ_", r"[0-9a-f]{40}\b"),
    ("sqp_", r"[0-9a-f]{40}\b"),
    ("sqa_", r"[0-9a-f]{40}\b"),
    ("bkua_", r"[0-9a-f]{40}\b"),
    ("rdme_", r"[0-9a-z]{50,}"),
    ("xkeysib-", r"[0-9a-f]{40,}[\w-]*"),
    ("v1.0-", r"[0-9a-f]{24}-[0-9a-f]{100,}"),
    ("HRKU-", r"[\w-]{30,}"),
    ("snyk_", r"[\w.-]{30,}"),
    ("sdk-", _UUID),
    ("amzn.mws.", _UUID),
    ("access-", r"(?:sandbox|development|production)-" + _UUID),
    ("ops_eyJ", r"[\w+/=-]{40,}"),
    ("1//0", r"[\w-]{30,}"),
    ("EAA", r"(?=[A-Za-z-]{0,60}\d)[\w-]{40,}"),
    ("EZ", r"[AT]K(?=[A-Za-z]{0,60}\d)[A-Za-z0-9]{50,}"),
    ("AKCp", r"(?=[A-Za-z]{0,60}\d)[A-Za-z0-9]{40,}"),
    ("cmVmdGtuO", r"[\w=-]{30,}"),
    ("ATCTT3", r"[\w=-]{40,}"),
    ("dt0", r"[a-z]\d\d\.[A-Z0-9]{20,}\.[A-Z0-9]{40,}"),
    ("re_", r"[A-Za-z0-9]{8}_(?=[A-Za-z]{0,60}\d)[A-Za-z0-9]{20,}"),
    ("pat", r"[A-Za-z0-9]{14}\.[0-9a-f]{64}\b"),
    ("hooks.zapier.com/hooks/catch/", r"[\w/]{8,}"),
)
_MAILCHIMP = _pattern(r"\b[0-9a-f]{32}-us\d{1,2}\b")
# Tokens of vendors not listed above: words in one case, a separator, and randomly generated letters and digits.
_DRAWN = _pattern(r"[_.-][A-Za-z0-9]{20,}(?![A-Za-z0-9])[\w=-]*")
_BEFORE_DRAWN = _pattern(
    r"(?<![A-Za-z0-9])(?:[a-z]{2}[a-z0-9]{0,14}|[A-Z]{2}[A-Z0-9]{0,14})(?:[_.-]{1,2}[a-z0-9]{1,14}){0,3}[_.-]?$"
)
_RUNS = _pattern(r"[a-z]+|[A-Z]+|[0-9]+")


def mask_text(text: str, *, code: bool = False) -> str:
    """Replace secrets inside a text: URL passwords, known token formats, private keys, and `name = value` pairs.

    With `code`, only quoted literals are values: `token = args.token` reveals nothing and stays. Line breaks are preserved,
    so a patch keeps its line counts.
    """
    if "PRIVATE KEY-----" in text:
        text = _PEM.sub(lambda m: m[1] + _blank(text[m.end(1) : m.start(2)]) + m[2], text)
    text = "".join(map(_shapes, _chunks(text)))
    return _pairs_in(text, code=code)


def mask_traceback(text: str) -> str:
    """Replace secrets in a traceback: its indented lines are code, the others are messages."""
    parts = itertools.groupby(text.splitlines(keepends=True), key=lambda line: line.startswith("    "))
    return "".join(mask_text("".join(lines), code=code) for code, lines in parts)


def _chunks(text: str) -> Iterator[str]:
    """Split at line ends, which no token crosses."""
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
    if "--" in text or " -u " in text:
        text = _BASIC.sub(rf"\g<1>{MASKED}", _PW.sub(rf"\g<1>{MASKED}", text))
    if "password" in text:
        text = _NETRC.sub(rf"\g<1>{MASKED}", text)
    if "Q~" in text:
        text = _AZURE.sub(MASKED, text)
    if ":AA" in text:
        text = _TELEGRAM.sub(MASKED, text)
    return _tokens(text)


def _tokens(text: str) -> str:
    """Replace tokens by their format."""
    for start, rest in _SHAPES:
        if start in text:
            text = _shape(start, rest).sub(MASKED, text)
    if "-us" in text:
        text = _MAILCHIMP.sub(MASKED, text)
    if len(text) > 50 and text.count(".") > 1:
        text = _DISCORD.sub(MASKED, text)
    return _DRAWN.sub(_drawn, text) if len(text) > 20 else text


def _drawn(match: re.Match[str]) -> str:
    """Replace the text after a prefix if it looks generated; names of models and classes contain words."""
    word = match[0][1:]
    before = _BEFORE_DRAWN.search(match.string[max(0, match.start() - 80) : match.start()])
    if before is None or before[0].startswith(("sha", "md5")):
        return match[0]
    runs = _RUNS.findall(word)
    kinds = {kind: [len(run) for run in runs if test(run)] for kind, test in _KINDS.items()}
    words = kinds["lower"]
    drawn = all(sum(kinds[kind]) >= 2 for kind in kinds) and sum(words) <= 2.4 * len(words) and len(runs) >= 0.4 * len(word)
    return match[0][0] + MASKED if drawn else match[0]


_KINDS = {"lower": str.islower, "upper": str.isupper, "digit": str.isdigit}


@functools.cache  # compiled on first use: compiling all at import would take milliseconds
def _shape(start: str, rest: str) -> re.Pattern[str]:
    # The literal comes first and the look-behind after it, so that the search runs at the speed of str.find.
    return re.compile(f"{re.escape(start)}(?<![A-Za-z0-9]{re.escape(start)}){rest}")


def _blank(text: str) -> str:
    """Replace each line, keeping the line breaks and the first column of a patch."""
    first, *rest = text.split("\n")
    lines = [(line[0] if line[:1] in {"+", "-", " "} else "") + (MASKED if line else "") for line in rest]
    return "\n".join([MASKED if first else "", *lines])


# A cheap filter for the end of every secret name; the whole name is then read leftwards and rated by `_level`. The first
# letter is separate so that the search can skip to it.
_TAIL = _pattern(r"[tkspcabTKSPCAB](?i:oken|ey|ecret|ass|wd|redential|ookie|earer|uth)[\w-]{0,40}(?=[\\\"'\]\s:=])")
_ENDS = ("oken", "ey", "ecret", "ass", "wd", "redential", "ookie", "earer", "uth")  # one of them is in each match
_QUOTE = r"\\{0,3}[\"']"
_OPENING = rf"(?=[rbfuRBFU]{{0,2}}{_QUOTE})"
_EQUALS = _pattern(
    rf"(?:{_QUOTE})?\]?[ \t]{{0,8}}(?:"
    rf":[ \t]{{0,4}}[\w.\[\]| ]{{1,40}}?=[\s(+-]{{0,24}}{_OPENING}"  # name: str = "…"
    r"|(?:=>|:?={1,2})[\s(+-]{0,24}|:[ \t]{0,8})"
    rf"|{_QUOTE}\s{{0,8}}(?P<comma>,)[\s+-]{{0,24}}{_OPENING}"  # setenv("NAME", "…")
)
_SPACE = _pattern(r"[ \t]+(?:\\\n[-+ ]?[ \t]*)?(?!-)")
_LONG = _pattern(r"[rbfuRBFU]{0,2}(?P<quote>\"{3}|'{3})(?P<body>.{0,4000}?)(?:(?P=quote)|\Z)", re.DOTALL)
_LITERAL = _pattern(rf"[rbfuRBFU]{{0,2}}(?P<quote>{_QUOTE})(?P<body>(?:(?!(?P=quote))(?:\\[^\n]|[^\\\n]))*)(?:(?P=quote))?")
_GROUP = _pattern(r"\[[^\]]{0,4000}\]?|\{[^}]{0,4000}\}?")
_BARE = _pattern(r"[|>][-+]?[ \t]*\n[^\n]*|(?:(?i:bearer|basic|token|digest)[ \t]+)?(?:[^\s&;\"'<>]|[\"'](?=\w))+")
_PLAIN = _pattern(r"(?i:none|null|nil|true|false)[,)\]}]*|\*\*\*.*")
_QUOTED = _pattern(r"[\"']([^\"'\n]{1,400})[\"']")


def _pairs_in(text: str, *, code: bool) -> str:
    if len(text) < SHORT and not any(end in text.lower() for end in _ENDS):
        return text
    out: list[str] = []
    done = at = 0
    while at < len(text):
        tail = _TAIL.search(text, at, at + CHUNK)
        if tail is None:
            at += CHUNK - 64  # a name may cross the boundary
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
    """Return the span of the secret that the name at `start:end` refers to, or None if there is none."""
    name = text[start:end]
    level = _level(name)
    equals = _equals(text, start, end) if level else None
    if equals is None:
        return None
    at = equals.end()
    if literal := _LONG.match(text, at) or _LITERAL.match(text, at):
        return literal.span("body") if _hides(literal["body"], name) else None
    outside = code and (equals[0][:1] in {'"', "'"} or not _in_quotes(text, start))
    if group := _GROUP.match(text, at):
        quoted = '"' in group[0] or "'" in group[0]
        worth = (quoted or not code) if level > 1 else quoted and any(_hides(word, name) for word in _QUOTED.findall(group[0]))
        return group.span() if worth and len(group[0]) > 2 else None
    bare = None if outside else _BARE.match(text, at)
    if bare is None or _PLAIN.fullmatch(bare[0]) or not _hides(bare[0].rstrip(",)]}"), name):
        return None
    return bare.span()


def _equals(text: str, start: int, end: int) -> re.Match[str] | None:
    """Match what joins a name to its value: `=`, `:`, a comma between quotes, or the space after an option."""
    equals = _EQUALS.match(text, end)
    if equals is None and text.startswith("--", start):
        return _SPACE.match(text, end)
    if equals and equals["comma"] and not (text.startswith("--", start) or text[start - 2 : start] in {'("', "('"}):
        return None  # a word in a list or sentence; a name is an option, or the first argument of a call
    return equals


def _in_quotes(text: str, at: int) -> bool:
    line = text[max(text.rfind("\n", 0, at) + 1, at - 1000) : at]
    return line.count('"') % 2 == 1 or line.count("'") % 2 == 1
