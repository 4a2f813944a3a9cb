"""Protects the command line: what its words mean, how a wrong one is answered, and that asking for help costs next to nothing."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trio_frontend.cli import build_parser, main
from trio_frontend.cli.arguments import own_command
from trio_frontend.cli.errors import UsageError, one_line
from trio_frontend.cli.serve import EngineChoice, choose_engine, server_config
from trio_frontend.config import LoraModule, ServerConfig


def parse(*words: str) -> ServerConfig:
    return server_config(build_parser().parse_args(["serve", *words]))


@pytest.fixture
def onnx_export(tmp_path: Path) -> str:
    (tmp_path / "model.onnx").touch()
    return str(tmp_path)


def test_without_a_model_the_packages_own_is_served_here() -> None:
    assert choose_engine(None, None, None) == EngineChoice("embedded", None)


def test_a_directory_with_an_onnx_export_is_served_here(onnx_export: str) -> None:
    assert choose_engine(onnx_export, None, None) == EngineChoice("embedded", onnx_export)


def test_an_export_in_the_onnx_folder_counts_too(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").touch()
    assert choose_engine(str(tmp_path), None, None).kind == "embedded"


def test_any_other_model_is_served_by_a_vllm_started_here(tmp_path: Path) -> None:
    assert choose_engine("org/name", None, None) == EngineChoice("owned vLLM", "org/name")
    assert choose_engine(str(tmp_path), None, None) == EngineChoice("owned vLLM", str(tmp_path))


def test_a_handshake_address_is_an_engine_elsewhere(onnx_export: str) -> None:
    assert choose_engine(onnx_export, None, "tcp://127.0.0.1:1") == EngineChoice("external vLLM", onnx_export)


def test_engine_decides_where_someone_wants_otherwise(onnx_export: str) -> None:
    assert choose_engine(onnx_export, "vllm", None).kind == "owned vLLM"
    assert choose_engine("org/name", "embedded", None).kind == "embedded"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((None, None, "tcp://127.0.0.1:1"), "MODEL"),
        ((None, "vllm", None), "MODEL"),
        (("m", "embedded", "tcp://127.0.0.1:1"), "--engine embedded"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: tuple[str | None, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        choose_engine(*arguments)


def test_the_defaults_of_the_command_are_those_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIO_FRONTEND_API_KEY", raising=False)
    assert parse() == ServerConfig(on_engine_death="exit")
    assert parse("--generation-config", "vllm").generation_defaults == {}


def test_a_dead_engine_elsewhere_is_waited_for_unless_told_otherwise() -> None:
    assert parse("m", "--handshake-address", "tcp://127.0.0.1:1").on_engine_death == "stay"
    assert parse("m", "--handshake-address", "tcp://127.0.0.1:1", "--on-engine-death", "exit").on_engine_death == "exit"


def test_each_flag_reaches_the_config(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.touch()
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    config = parse(
        *["--served-model-name", "a", "b", "--host", "::", "--port", "0", "--uds", "s.sock"],
        *[
            "--control-address",
            "127.0.0.1:9",
            "--api-key",
            "k1",
            "k2",
            "--shutdown-timeout",
            "3",
            "--withdrawal-grace",
            "1.5",
        ],
        *["--max-logprobs", "-1", "--structured-outputs-backend", "guidance", "--stream-interval", "4"],
        *[
            "--lora-modules",
            "x=/x",
            "y=/y",
            "--generation-config",
            str(tmp_path),
            "--tokenizer",
            "t",
            "--hf-config-path",
            "c",
        ],
        *["--ssl-certfile", str(certificate), "--ssl-ca-certs", str(certificate), "--ssl-cert-reqs", "2"],
    )
    assert config.served_model_names == ("a", "b")
    assert (config.host, config.port, config.unix_socket, config.control_address) == ("::", 0, "s.sock", ("127.0.0.1", 9))
    assert (config.api_keys, config.shutdown_timeout, config.withdrawal_grace) == (("k1", "k2"), 3, 1.5)
    assert (config.max_logprobs, config.structured_outputs_backend, config.stream_interval) == (-1, "guidance", 4)
    assert config.lora_modules == (LoraModule("x", "/x"), LoraModule("y", "/y"))
    assert (config.generation_defaults, config.tokenizer, config.hf_config_path) == ({"top_k": 5}, "t", "c")
    assert config.tls is not None
    assert (config.tls.certfile, config.tls.keyfile, config.tls.cert_reqs) == (str(certificate), None, 2)


def test_the_api_key_may_come_from_the_environment_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_FRONTEND_API_KEY", "from-env")
    assert parse().api_keys == ("from-env",)
    assert parse("--api-key", "from-flag").api_keys == ("from-flag",)


def test_help_does_not_show_the_api_key_of_the_environment(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TRIO_FRONTEND_API_KEY", "hunter2")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "hunter2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "65536"], "--port"),
        (["--port", "x"], "--port: x: a port is between 0 and 65535"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--shutdown-timeout", "soon"], "--shutdown-timeout: 'soon': seconds, 0 or more"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--control-address", "nowhere"], "--control-address nowhere"),
        (["--lora-modules", "name"], "--lora-modules name"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "/no/such/file"], "--ssl-certfile /no/such/file"),
        (["--generation-config", "/no/such/directory"], "--generation-config /no/such/directory"),
        (["--stream-interval", "0"], "--stream-interval"),
        (["--stream-interval", "x"], "--stream-interval: 'x': a number, 1 or more"),
        (["--engine", "llama"], "--engine"),
        (["--engine", "vllm"], "MODEL"),
        (["--", "--dtype", "float16"], "flags after '--'"),
    ],
)
def test_a_bad_command_line_is_one_clear_line_and_exit_code_2(words: list[str], said: str, capsys) -> None:
    try:
        code = main(["serve", *words])
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    assert code == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert said in last
    assert last.startswith("trio-frontend")
    assert ": error: " in last
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("flag", ["--ssl-ca-certs", "--ssl-certfile", "--ssl-keyfile"])
def test_a_clients_tls_file_that_is_not_there_is_named(flag: str, capsys) -> None:
    assert main(["info", "--tls", flag, "/no/such/file"]) == 2
    assert (
        capsys.readouterr().err == f"trio-frontend info: error: {flag} /no/such/file: no such file, or it cannot be read\n"
    )


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        ("/env/bin/trio-frontend", True, "trio-frontend"),
        (".venv/bin/trio-frontend", False, ".venv/bin/trio-frontend"),
        ("/src/trio_frontend/__main__.py", False, "trio-frontend"),
    ],
)
def test_the_command_that_is_shown_to_try_can_be_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, called: str, on_path: bool, shown: str
) -> None:
    if on_path:
        (tmp_path / "trio-frontend").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [called, "serve"])
    assert own_command() == shown


def test_ctrl_c_while_the_command_line_is_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trio_frontend.cli.build_parser", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == ""


def test_a_group_of_exceptions_is_told_in_one_line_each_once() -> None:
    inner = OSError(98, "Address already in use")
    group = BaseExceptionGroup("a", [ExceptionGroup("b", [inner, KeyError("x\ny")]), ExceptionGroup("c", [inner])])
    assert one_line(group) == "Address already in use; KeyError: 'x\\ny'"


def test_a_fault_of_our_own_has_one_traceback_and_no_groups(monkeypatch, capsys) -> None:
    def fail(_: object) -> int:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("fault")])])

    monkeypatch.setattr("trio_frontend.cli.serve.run", fail)
    assert main(["serve"]) == 1
    printed = capsys.readouterr().err
    assert printed.endswith("\ntrio-frontend serve: KeyError: 'fault'\n")
    assert "ExceptionGroup" not in printed
    assert printed.count("KeyError: 'fault'") == 2  # its traceback's last line, and ours


@pytest.mark.parametrize("error", [OSError(2, "No such file", "f"), ValueError("x is wrong"), UsageError("wrong")])
def test_what_a_user_can_mend_is_one_line_without_a_traceback(monkeypatch, capsys, error) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("trio_frontend.cli.serve.run", fail)
    assert main(["serve"]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1


def test_help_and_the_package_are_quick_to_import() -> None:
    def processor_seconds(*command: str) -> float:
        # Not the clock's: the machine may have other work.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(processor_seconds("-m", "trio_frontend", "--help") for _ in range(3)) < 0.3
    assert min(processor_seconds("-c", "import trio_frontend") for _ in range(3)) < 0.4
