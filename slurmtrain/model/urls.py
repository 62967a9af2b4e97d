"""URLs: the passwords inside of them, which are recorded and printed nowhere, and the address of a database."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

HIDDEN = "<redacted>"
# Text up to the last @ before a slash, or else up to the next @: whoever writes a password with a slash into a URL has
# forgotten to encode it. Neither a port with an @ after it nor a variable of a shell is a password. A scheme is sought
# only where a word begins, so that a long word is read once.
_IN_ACCOUNT = re.compile(
    r"(?P<before>(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://[^\s/@:?#\[\"'`]*:)(?!\d*[/?#]|\$|<redacted>)"
    r"(?:[^\s/?#\"'`]+|[^\s@\"'`]+)(?=@)"
)
_WORD = re.compile(r"[^\s\"'`]+")
# Behind a scheme.
_IN_QUERY = re.compile(r"(?P<before>[?&]\w*(?:passw(?:or)?d|pwd|secret|token)=)(?!\$|<redacted>)[^&#]+", re.IGNORECASE)
_OF_SERVER = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, or write MLflow's own file "
    "~/.mlflow/credentials (chmod 600)"
)
_USER = re.compile(r"https?://[^\s/@?#\"'`]+@")
_SECRET_VALUE = re.compile(
    r"(?i)\b([\w.-]*(?:token|key|password|passwd|secret|credential)s?[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"
)
# Text that is assigned to such a name; "key" alone is too common in code. And what tokens of widespread services look
# like: Hugging Face, GitHub, AWS, Weights & Biases.
_SECRET_TEXT = re.compile(
    r"(?i)([\w.-]*(?:token|api_?key|access_?key|password|passwd|secret|credential)s?[\"']?\]?\s*[=:]\s*)([\"'])[^\"']{4,}\2"
)
_SECRET_SETTING = re.compile(
    r"(?i)^([-+ ]\s*(?:export\s+)?\w*(?:token|key|password|passwd|secret|credential)\s*[=:]\s*)[^\s\"'$({]{4,}$"
)
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\b[0-9a-f]{40}\b"
)


def has_url_password(text: str) -> bool:
    """Whether a text has a URL with a password in it, rather than with a variable that has one."""
    return without_url_passwords(text) != text


def without_url_passwords(text: str) -> str:
    """A text with the passwords of its URLs replaced."""
    if "://" not in text:
        return text
    hidden = rf"\g<before>{HIDDEN}"

    def hide(word: re.Match[str]) -> str:
        # Only up to the last @: each URL behind it would be sought one, up to the end of the word.
        before, at, after = word[0].rpartition("@")
        scheme, slashes, rest = f"{_IN_ACCOUNT.sub(hidden, before + at)}{after}".partition("://")
        return f"{scheme}{slashes}{_IN_QUERY.sub(hidden, rest)}"

    return _WORD.sub(hide, text)


def check_tracking_uri(uri: str) -> None:
    """Raise ValueError, with what to write instead, for a tracking URI that holds a password: URIs are recorded."""
    if not has_url_password(uri) and not _USER.match(uri):
        return
    scheme = re.split(r"[:+]", uri)[0]
    cures = {
        "http": _OF_SERVER,
        "https": _OF_SERVER,
        "postgresql": "keep the password in ~/.pgpass (chmod 600), or set PGPASSWORD, and write postgresql://user@host/name",
        "mysql": "keep the password in a file (chmod 600), and name it as in "
        "mysql+pymysql://user@host/name?read_default_file=/home/user/.my.cnf",
    }
    cure = cures.get(scheme, "let the driver of the database take the password from a file or a variable")
    raise ValueError(f"credentials do not belong in a URI that is recorded; {cure}")


SCHEMES = ("postgresql+psycopg", "postgresql", "postgres")
_EXAMPLE = "'postgresql+psycopg://user@host/database'"
# What needs no quotes in SQL, of at most as many bytes as PostgreSQL keeps of a name.
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_SEARCH_PATH = re.compile(r"search_path\s*=\s*([^\s]+)")
# In the names of libpq's parameters that are secrets: password, sslpassword, oauth_client_secret.
_SECRET = re.compile("password|secret")
# How much of the runs root's path is in the name of its schema, for people; the hash is for slurmtrain.
_TAIL = 30


def is_url(text: str) -> bool:
    """Whether the value of a key is the address of a database, rather than the path of a file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A database, and the schema in it that has the tables of one runs root.

    ``text``: the address for libpq, which may contain a password; ``str()`` of this object has none. ``root``: the runs
    root whose runs the schema holds.
    """

    text: str = field(repr=False)
    schema: str = ""
    root: Path = Path()

    def __str__(self) -> str:
        parts = urlsplit(self.text)
        account, at, host = parts.netloc.rpartition("@")
        user = account.partition(":")[0]
        query = "&".join(
            f"{key}={quote(value)}"
            for key, values in parse_qs(parts.query).items()
            for value in values
            if key != "options" and not _SECRET.search(key)
        )
        return f"{SCHEMES[0]}://{user}{at}{host}{parts.path}{'?' if query else ''}{query}"

    @property
    def password(self) -> str | None:
        """The password, or another secret, in the address, if there is one."""
        parts = urlsplit(self.text)
        _, colon, password = parts.netloc.rpartition("@")[0].partition(":")
        if colon:
            return unquote(password)
        return next((values[0] for key, values in parse_qs(parts.query).items() if _SECRET.search(key)), None)

    @property
    def options(self) -> str:
        """The command-line options of the session, such as ``-csearch_path=NAME``."""
        return " ".join(parse_qs(urlsplit(self.text).query).get("options", ()))

    def of_root(self, root: Path) -> DatabaseUrl:
        """The same database, for the runs in ``root``.

        The schema is the one that the options name, or else one of this root's own.
        """
        named = _SEARCH_PATH.search(self.options)
        # A name that no other runs root has, with the end of its path, for people.
        tail = re.sub(r"[^a-z0-9]+", "_", "_".join(root.parts[-2:]).lower()).strip("_")[-_TAIL:]
        digest = hashlib.sha256(str(root).encode(errors="surrogateescape")).hexdigest()[:8]
        return replace(self, schema=named[1].strip('"') if named else f"slurmtrain_{tail}_{digest}", root=root)


def read_database_url(text: str) -> DatabaseUrl:
    """The database at an address. Raises ValueError with a sentence, which has no password, if it is none."""
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(f"is not a URL; expected a file, or a database such as {_EXAMPLE}") from None
    if "@" in f"{parts.path}{parts.query.partition('options=')[0]}{parts.fragment}":
        raise ValueError(
            "has an @ after the host: write /, ?, # and @ in a name or a password as %2F, %3F, %23 and %40, or keep "
            "the password in ~/.pgpass"
        )
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"has a port that is not a number; expected a database such as {_EXAMPLE}") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"cannot be {parts.scheme}://; expected a file, or a database such as {_EXAMPLE}")
    named = _SEARCH_PATH.search(DatabaseUrl(text).options)
    if named and not _NAME.fullmatch(named[1].strip('"')):
        raise ValueError("has a search_path that is not one name of a-z, 0-9 and _, as the registry needs it")
    # libpq has no name of a driver in its addresses.
    return DatabaseUrl(f"postgresql://{text.partition('://')[2]}")


def redact_code(line: str) -> str:
    """A line of a difference between two versions of code, without texts that look like secrets."""
    line = _SECRET_TEXT.sub(r"\1\2<redacted>\2", line)
    return without_url_passwords(_TOKENS.sub("<redacted>", _SECRET_SETTING.sub(r"\1<redacted>", line)))


def redact(line: str) -> str:
    """The line with the values of names such as token, key, password or secret, and passwords in URLs, replaced."""
    return _SECRET_VALUE.sub(r"\1<redacted>", without_url_passwords(line))
