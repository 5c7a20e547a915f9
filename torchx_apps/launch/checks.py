"""What is refused before a job is submitted, each with the way that works. Imports TorchX alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torchx
from torchx.specs import AppDef, Role
from torchx.util.strings import normalize_str

# Schedulers that run the job in this machine's folders and environment, where others
# run an image.
WITHOUT_IMAGE = ("local_cwd", "slurm")

_LABEL = re.compile(r"[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
# Characters; a pod's name is its host name.
_HOST_NAME = 63
# TorchX adds this many characters to make a job's name unique.
_SUFFIX = 15
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_MOUNT_KEYS = {
    "src",
    "source",
    "dst",
    "destination",
    "target",
    "readonly",
    "read_only",
    "perm",
}
_MOUNT_FORMS = (
    "type=bind,src=/host/folder,dst=/folder[,readonly], type=volume,src=CLAIM,dst=/folder[,readonly] or "
    "type=device,src=/dev/NAME"
)

_SECRET_WORDS = {
    "TOKEN",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "SECRET",
    "CREDENTIAL",
    "CREDENTIALS",
    "APIKEY",
}
_SECRET_WORDS |= {"PASSWORDS", "SECRETS", "CREDS"}
_SECRET_LAST_WORDS = {
    "KEY",
    "PASS",
    "PWD",
    "AUTH",
    "PAT",
    "COOKIE",
    "COOKIES",
    "TOKENS",
}
# MAX_TOKENS is a number of tokens, not a secret.
_COUNTS = {"MAX", "MIN", "NUM"}
# api_key is a secret in a setting, sort_key is none.
_KINDS_OF_KEYS = {"API", "ACCESS", "PRIVATE", "SIGNING", "ENCRYPTION", "SSH"}
_NUMBERS = re.compile(r"[-+.,eE\d]+|true|false", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMES_OF_FILES = {"GOOGLE_APPLICATION_CREDENTIALS"}
_SHOWN = "which the job's description, script, logs and `ps` would show"
_PASSWORD_IN_ADDRESS = re.compile(
    r"://[^\s/@]*:[^\s/@]+@|https?://[^\s/@]+@|[?&](password|token|access_token|api_key|sig|signature|X-Amz-Signature|"
    r"X-Goog-Signature)=[^&\s]",
    re.IGNORECASE,
)


def check_words(words: Sequence[str]) -> None:
    """Refuses a component's flags if TorchX would change them, or reject them without naming the flag.

    Args:
        words: the component's flags, as typed.

    Raises:
        ValueError: a value has a ``$$``, which TorchX makes a ``$``, a variable's value has a ``=``, or ``--mounts``
            has a wrong form.

    Example:
        >>> check_words(["--run_dir", "runs/a$$b"])
        Traceback (most recent call last):
        ...
        ValueError: runs/a$$b: TorchX makes one $ of two; write runs/a$$$$b
        >>> check_words(["--mounts=type=volume,src=runs"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --mounts type=volume,src=runs: a volume needs dst; write type=bind,src=/host/folder,dst=/folder...
    """
    for word in words:
        if re.search(r"(?<!\$)\$\$(?!\$)", word):
            raise ValueError(
                f"{word}: TorchX makes one $ of two; write {word.replace('$$', '$$$$')}"
            )
    for word, following in zip(words, [*words[1:], ""], strict=True):
        # A flag's value is in the same word, or is the next one.
        flag, equals, value = word.partition("=")
        if not equals:
            value = following
        if flag == "--mounts":
            _check_mounts(value)
        elif flag == "--env":
            _check_variables(value)


def _check_variables(text: str) -> None:
    """Refuses a ``=`` within a value: TorchX takes it for the next variable's, and names neither."""
    for words in text.split("=")[1:-1]:
        if not re.search(r"[,;]\s*\w+$", words):
            raise ValueError(
                f"--env {text}: TorchX takes no '=' within a value; write ':' in PET_RDZV_CONF, and set "
                "another variable where the job runs"
            )


def _check_mounts(text: str) -> None:
    mounts: list[dict[str, str]] = []
    for option in text.split(","):
        key, _, value = option.partition("=")
        if key == "type":
            mounts.append({"type": value})
        elif not mounts:
            raise ValueError(
                f"--mounts {text}: begins without its type; write {_MOUNT_FORMS}"
            )
        elif key not in _MOUNT_KEYS:
            raise ValueError(
                f"--mounts {text}: there is no option '{key}'; write {_MOUNT_FORMS}"
            )
        else:
            short = {"source": "src", "destination": "dst", "target": "dst"}.get(
                key, key
            )
            mounts[-1][short] = value
    for mount in mounts:
        kind = mount["type"]
        if kind not in ("bind", "volume", "device"):
            raise ValueError(
                f"--mounts {text}: there is no type '{kind}'; write {_MOUNT_FORMS}"
            )
        # A device may keep its path in the container.
        required = ("src",) if kind == "device" else ("src", "dst")
        missing = [key for key in required if not mount.get(key)]
        if missing:
            raise ValueError(
                f"--mounts {text}: a {kind} needs {' and '.join(missing)}; write {_MOUNT_FORMS}"
            )
        if not mount.get("dst", "/").startswith("/"):
            raise ValueError(
                f"--mounts {text}: dst={mount['dst']} must begin with /, it is in the container"
            )
        if set(mount.get("perm", "rwm")) - set("rwm"):
            raise ValueError(
                f"--mounts {text}: perm={mount['perm']} may have the letters r, w and m alone"
            )


def check_app(
    app: AppDef, scheduler: str, *, workspace: str | None = None
) -> list[str]:
    """Refuses a job if its scheduler would not run it, or if it shows a secret.

    Args:
        app: the job.
        scheduler: name of the scheduler, such as ``slurm``.
        workspace: folder that TorchX would build into the image, as ``file:///folder``; empty or None for none.

    Returns:
        Lines about what the scheduler leaves out.

    Raises:
        ValueError: a name, a port, an image or a secret is wrong there.
    """
    if "/" in app.name:
        raise ValueError(
            f"--name: the job would be called '{app.name}', and a job's name has no slash; EXPERIMENT/RUN has one"
        )
    for role in app.roles:
        _check_names(role)
        _check_secrets(role, scheduler)
    if scheduler == "kubernetes":
        _check_for_kubernetes(app, workspace or "")
    for role in app.roles:
        if scheduler == "slurm" and role.min_replicas not in (None, role.num_replicas):
            nodes = f"{role.min_replicas}:{role.num_replicas}"
            raise ValueError(
                f"-j {nodes}x...: Slurm gives a job all of its nodes or none; write -j {role.num_replicas}"
                "x... --max_retries 3, which goes on from the last checkpoint"
            )
    if scheduler in WITHOUT_IMAGE and any(role.mounts for role in app.roles):
        return [
            f"note: --mounts: {scheduler} runs in this machine's own folders and mounts nothing"
        ]
    return []


def _check_for_kubernetes(app: AppDef, workspace: str) -> None:
    if not _LABEL.fullmatch(app.name):
        raise ValueError(
            f"--name {app.name}: on Kubernetes a name begins with a letter and has letters, digits, - "
            "_ . alone; write for example two-tower-1"
        )
    for role in app.roles:
        task = normalize_str(f"{role.name}-{role.num_replicas - 1}")
        longest = _HOST_NAME - _SUFFIX - len(f"-{task}-0")
        if len(normalize_str(app.name)) > longest:
            raise ValueError(
                f"--name {app.name}: has {len(app.name)} characters; Kubernetes names a pod {app.name}-ID-{task}-0, "
                f"which may have {_HOST_NAME}: at most {longest} of them are the job's"
            )
        for name, port in role.port_map.items():
            if not 1 <= port <= 65535:
                raise ValueError(
                    f"--port {port}: Kubernetes opens a pod's port {name} by number; write 1 to 65535"
                )
        hosts = [
            word.partition("=")[2] for word in role.args if word.startswith("--host=")
        ]
        if hosts and hosts[0] in _LOOPBACK:
            raise ValueError(
                f"--host {hosts[0]}: nobody outside its pod would reach the service; write --host 0.0.0.0, and give it "
                "a token"
            )
        if role.image == torchx.IMAGE and not _dockerfile(workspace):
            raise ValueError(
                f"--image: TorchX's own image, {torchx.IMAGE}, does not have this package; build one that has it and "
                "name it: --image my_image:1"
            )


def _dockerfile(workspace: str) -> bool:
    return (
        bool(workspace)
        and (Path(workspace.removeprefix("file://")) / "Dockerfile.torchx").exists()
    )


def _check_names(role: Role) -> None:
    """Refuses variable names unfit for a shell: a script of a scheduler has them unquoted."""
    for name in role.env:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                f"--env {name!r}: a variable's name has letters, digits and _ alone, and begins with no digit; write "
                "--env NAME=VALUE,NAME=VALUE"
            )


def _check_secrets(role: Role, scheduler: str) -> None:
    for name, value in role.env.items():
        if value and is_secret(name):
            raise ValueError(
                f"--env {name}: this looks like a secret, {_SHOWN}; {_way(scheduler, name)}"
            )
        if _PASSWORD_IN_ADDRESS.search(value):
            raise ValueError(
                f"--env {name}: the address holds a password, {_SHOWN}; {_way(scheduler, name)}"
            )
    for flag, value in role_flags(role):
        if _PASSWORD_IN_ADDRESS.search(value):
            raise ValueError(
                f"--{flag}: the address holds a password, {_SHOWN}; {_way(scheduler, 'a variable for it')}"
            )
        key = flag
        if flag in ("set", "vary", "member"):
            path, _, value = value.partition("=")
            key = path.rpartition(".")[2]
        if _is_secret_setting(key, value):
            raise ValueError(
                f"--{flag} ...{key}: this looks like a secret, {_SHOWN}; {_way(scheduler, key.upper())}"
            )


def check_trackers(role: Role) -> None:
    """Refuses a tracker address with a password, since TorchX has put it among the variables of a role.

    Raises:
        ValueError: an address holds a password.
    """
    for name, value in role.env.items():
        tracker = re.fullmatch("TORCHX_TRACKER_(.+)_CONFIG", name)
        if tracker and _PASSWORD_IN_ADDRESS.search(value):
            raise ValueError(
                f"config of [tracker:{tracker[1].lower()}] in .torchxconfig: the address holds a password, {_SHOWN}; "
                "leave it out, and set a variable of the job's environment that the tracker reads"
            )


def _is_secret_setting(key: str, value: str) -> bool:
    """Whether a setting would hold a secret: keys and tokens are often something else in a recipe.

    Example:
        >>> [_is_secret_setting(key, "a") for key in ("api_key", "apiKey", "secret_key", "private_key", "hf_token")]
        [True, True, True, True, True]
        >>> [_is_secret_setting(key, "a") for key in ("key", "sort_key", "user_key")]
        [False, False, False]
        >>> [_is_secret_setting(key, "64") for key in ("tokens", "token_dim", "password")]
        [False, False, True]
    """
    words = _words(key)
    if words[-1] in ("KEY", "KEYS"):
        return not (_KINDS_OF_KEYS | _SECRET_WORDS).isdisjoint(words)
    # A number of tokens, or the size of one.
    if _NUMBERS.fullmatch(value) and not {"TOKEN", "TOKENS"}.isdisjoint(words):
        return False
    return is_secret(key)


def is_secret(name: str) -> bool:
    """Whether a variable of this name would hold a secret, not the name of a file with one.

    Example:
        >>> [is_secret(name) for name in ("REDIS_PASSWORD", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN")]
        [True, True, True, True]
        >>> [is_secret(name) for name in ("TOKENIZERS_PARALLELISM", "TOKEN_FILE", "AWS_ACCESS_KEY_ID", "KEYS")]
        [False, False, False, False]
        >>> [is_secret(name) for name in ("DB_PASS", "MYSQL_PWD", "dbPassword", "SESSION_TOKENS", "PWD", "MAX_TOKENS")]
        [True, True, True, True, False, False]
    """
    words = _words(name)
    if name in (*_NAMES_OF_FILES, "PWD") or words[-1] in ("FILE", "PATH", "ID", "NAME"):
        return False
    if words[-1] == "TOKENS" and not _COUNTS.isdisjoint(words):
        return False
    return words[-1] in _SECRET_LAST_WORDS or not _SECRET_WORDS.isdisjoint(words)


def _words(name: str) -> list[str]:
    # dbPassword, DB_PASSWORD and db-password have the same words.
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-", "_", name)
    return separated.upper().split("_")


def _way(scheduler: str, name: str) -> str:
    if scheduler in WITHOUT_IMAGE:
        return f"export {name} in the shell that submits, whose environment the job takes over"
    if scheduler == "kubernetes":
        return (
            f"put {name} into a Secret of the cluster, and name that: -cfg secret=NAME"
        )
    return f"have {scheduler} give {name} to the job from its own store of secrets"


def role_flags(role: Role) -> Iterator[tuple[str, str]]:
    """Yields each flag of a role's command with its value, of ``--flag=value`` and ``--flag value``."""
    # torchrun's command is one text for bash, with quotes around its words.
    words = " ".join(role.args).split() if role.entrypoint == "bash" else role.args
    for word, following in zip(words, [*words[1:], ""], strict=True):
        word = word.strip("'\"")
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            yield flag, value if equals else following
