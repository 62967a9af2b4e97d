"""The part of MLflow's client that slurmtrain uses, over REST: for a process that has no room for mlflow itself.

Importing mlflow 3.17 takes a second of processor time, 1,800 modules and 165 MB of the job's memory; this takes 0.15 s,
290 modules and 26 MB. Methods, arguments and results have the same names as in ``mlflow.MlflowClient``.
Source of the requests: https://mlflow.org/docs/latest/api_reference/rest-api.html (version 2.0 of the API).
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit, urlunsplit

# In seconds, for each request: as long as MLflow's own client is given (mlflow_tracker).
_TIMEOUT_S = 10.0
# Bytes: whatever it is that answers, it must not use up the memory of a job.
_LONGEST_ANSWER = 1 << 24


class RestError(Exception):
    """A request failed. ``error_code``: MLflow's, empty if there is none."""

    def __init__(self, message: str, *, error_code: str = "") -> None:
        """``message``: why."""
        super().__init__(message)
        self.error_code = error_code


class Param(NamedTuple):
    """A param of a run."""

    key: str
    value: str


class RunTag(NamedTuple):
    """A tag of a run."""

    key: str
    value: str


class Metric(NamedTuple):
    """The value of a metric after ``step`` finished steps, ``timestamp`` milliseconds after 1970."""

    key: str
    value: float
    timestamp: int
    step: int


class RestClient:
    """A client of an MLflow server. Each method raises RestError.

    Runs have ``info`` with ``run_id``, ``experiment_id``, ``status`` and ``lifecycle_stage``, and ``data`` with the
    newest values of ``params``, ``tags`` and ``metrics`` by name.
    """

    def __init__(self, uri: str, environ: Mapping[str, str], *, proxies: bool = True) -> None:
        """Nothing is asked yet.

        Args:
            uri: The server's address.
            environ: Where MLflow's variables are.
            proxies: Whether requests may go through the proxies that the environment of this process names.
        """
        parts = urlsplit(uri)
        self._base = f"{urlunsplit(parts._replace(path=parts.path.rstrip('/')))}/api/2.0/mlflow"
        self._headers = {"Content-Type": "application/json", "User-Agent": "slurmtrain", **_authorization(environ)}
        if workspace := environ.get("MLFLOW_WORKSPACE"):
            self._headers["X-MLFLOW-WORKSPACE"] = workspace
        self._timeout_s = _TIMEOUT_S
        with contextlib.suppress(ValueError):
            self._timeout_s = float(environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or _TIMEOUT_S)
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_context(environ)))
        if not proxies:
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    # Arguments and results are the same as in mlflow.MlflowClient.
    def get_experiment_by_name(self, name: str) -> Any | None:
        """The experiment of this name, by ``experiment_id`` and ``lifecycle_stage``; None if there is none."""
        try:
            experiment = _part(self._get("experiments/get-by-name", experiment_name=name), "experiment")
        except RestError as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return SimpleNamespace(
            experiment_id=str(_part(experiment, "experiment_id")),
            lifecycle_stage=str(experiment.get("lifecycle_stage", "active")),
        )

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        """The id of a new experiment."""
        return str(
            _part(self._post("experiments/create", name=name, artifact_location=artifact_location), "experiment_id")
        )

    def get_run(self, run_id: str) -> Any:
        """A run, which may have been deleted."""
        return _run_of(_part(self._get("runs/get", run_id=run_id), "run"))

    def search_runs(
        self,
        experiment_ids: Sequence[str],
        filter_string: str = "",
        max_results: int = 1000,
        order_by: Sequence[str] | None = None,
    ) -> list[Any]:
        """The runs that fulfil a condition and were not deleted.

        Args:
            experiment_ids: Ids of their experiments.
            filter_string: The condition, in MLflow's words.
            max_results: The largest number of runs.
            order_by: Their order, in MLflow's words.
        """
        # Only the first page: nobody here looks for more than a few runs.
        answer = self._post(
            "runs/search",
            experiment_ids=list(experiment_ids),
            filter=filter_string,
            max_results=max_results,
            order_by=order_by,
        )
        return [_run_of(run) for run in answer.get("runs", ())]

    def create_run(self, experiment_id: str, start_time: int | None, tags: Mapping[str, str], run_name: str) -> Any:
        """A new run called ``run_name`` in the experiment ``experiment_id``, with these ``tags``.

        It started ``start_time`` milliseconds after 1970; None: now.
        """
        created = self._post(
            "runs/create",
            experiment_id=experiment_id,
            user_id=tags.get("mlflow.user", "unknown"),
            start_time=_now() if start_time is None else start_time,
            tags=[RunTag(*tag)._asdict() for tag in tags.items()],
            run_name=run_name,
        )
        return _run_of(_part(created, "run"))

    def update_run(self, run_id: str, status: str) -> None:
        """Set the ``status`` of the run ``run_id``."""
        self._post("runs/update", run_id=run_id, status=status)

    def set_terminated(self, run_id: str, status: str, end_time: int | None = None) -> None:
        """Set the ``status`` of the run ``run_id``, and that it ended ``end_time`` milliseconds after 1970, or now."""
        self._post("runs/update", run_id=run_id, status=status, end_time=_now() if end_time is None else end_time)

    def delete_run(self, run_id: str) -> None:
        """Delete a run, which can be undone."""
        self._post("runs/delete", run_id=run_id)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        """Set the tag ``key`` of the run ``run_id`` to ``value``."""
        self._post("runs/set-tag", run_id=run_id, key=key, value=value)

    def delete_tag(self, run_id: str, key: str) -> None:
        """Remove the tag ``key`` of the run ``run_id``."""
        self._post("runs/delete-tag", run_id=run_id, key=key)

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[RunTag] = ()
    ) -> None:
        """Add ``metrics``, ``params`` and ``tags`` to the run ``run_id``."""
        # JSON has no NaN; protobuf's reads it as text.
        odd = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        sent = [{**metric._asdict(), "value": odd.get(str(metric.value), metric.value)} for metric in metrics]
        self._post(
            "runs/log-batch",
            run_id=run_id,
            metrics=sent or None,
            params=[param._asdict() for param in params] or None,
            tags=[tag._asdict() for tag in tags] or None,
        )

    def list_artifacts(self, run_id: str) -> list[Any]:
        """What is at the top of the artifacts of a run, each with its ``path``."""
        return [SimpleNamespace(**file) for file in self._get("artifacts/list", run_id=run_id).get("files", ())]

    def _get(self, method: str, **fields: str) -> Any:
        """The answer to a question, such as ``runs/get``. Raises RestError."""
        return self._request(f"{method}?{urlencode(fields)}", None)

    def _post(self, method: str, **content: Any) -> Any:
        """The answer to an order, such as ``runs/create``; fields that are None are left out. Raises RestError."""
        return self._request(method, {name: value for name, value in content.items() if value is not None})

    def _request(self, method: str, content: object) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self._base}/{method}", body, self._headers)  # noqa: S310 (http or https)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read(_LONGEST_ANSWER))
        except urllib.error.HTTPError as error:
            answered: object = None
            with error, contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                answered = json.loads(error.read(_LONGEST_ANSWER))
            # MLflow's own words, if it is MLflow that answers.
            words = answered if isinstance(answered, dict) else {}
            code, message = str(words.get("error_code") or ""), str(words.get("message") or error.reason)
            raise RestError(f"{code or error.code}: {message}", error_code=code) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise RestError(str(reason) or type(reason).__name__) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the password there, and a POST as a GET."""

    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        """Nothing: the answer is an error."""


def _authorization(environ: Mapping[str, str]) -> dict[str, str]:
    """The header that says who sends; MLflow's client looks at the same places."""
    file = configparser.ConfigParser()
    if home := environ.get("HOME"):
        with contextlib.suppress(OSError, ValueError, configparser.Error):
            file.read(Path(home, ".mlflow", "credentials"))
    name, password = (
        environ.get(variable) or file.get("mlflow", variable.lower(), raw=True, fallback=None)
        for variable in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    )
    if name and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}
    token = environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Which certificates count, by MLflow's variables."""
    authority = environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=authority)
    if environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if own := environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"):
        context.load_cert_chain(own)
    return context


def _run_of(answer: Any) -> SimpleNamespace:
    """A run in an answer."""
    info, data = _part(answer, "info"), answer.get("data", {})
    return SimpleNamespace(
        info=SimpleNamespace(
            **{name: str(_part(info, name)) for name in ("run_id", "experiment_id", "status", "lifecycle_stage")}
        ),
        data=SimpleNamespace(
            **{
                kind: {_part(each, "key"): each.get("value") for each in data.get(kind, ())}
                for kind in ("params", "tags", "metrics")
            }
        ),
    )


def _part(answer: Any, name: str) -> Any:
    """A part of an answer. Raises RestError if there is none: not everything that answers is MLflow."""
    if not isinstance(answer, Mapping) or name not in answer:
        raise RestError(f"the answer is not MLflow's: it has no {name!r}")
    return answer[name]


def _now() -> int:
    return int(time.time() * 1000)
