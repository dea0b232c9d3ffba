"""Each variable: its default, what it takes, and what nonsense gets."""

import os

import pytest
from flashinfer_wsfix import settings

import fresh

NAMES = [setting.variable for setting in settings.SETTINGS.values()]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)


def test_defaults():
    assert settings.read() == (settings.Settings("on", 40 << 20, ("fp8", "bf16"), True, "used", False, "INFO"), [])


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("", "0", "mode", "off"),
        ("", "Off", "mode", "off"),
        ("", "true", "mode", "on"),
        ("", " OBSERVE ", "mode", "observe"),
        ("_WORKSPACE_MIB", "0", "workspace_bytes", 0),
        ("_WORKSPACE_MIB", " 64 ", "workspace_bytes", 64 << 20),
        ("_WORKSPACE_MIB", "65536", "workspace_bytes", 64 << 30),
        ("_GATE", "off", "gate", ()),
        ("_GATE", "bf16 , FP8", "gate", ("fp8", "bf16")),
        ("_GATE", "bf16", "gate", ("bf16",)),
        ("_VLLM", "no", "vllm", False),
        ("_PRESIZE", "ALL", "presize", "all"),
        ("_PRESIZE", "off", "presize", ()),
        ("_PRESIZE", "mm_bf16_workspace,bmm_fp8_workspace", "presize", ("bmm_fp8_workspace", "mm_bf16_workspace")),
        ("_STRICT", "1", "strict", True),
        ("_LOG", "warning", "log", "WARNING"),
    ],
)
def test_what_a_variable_takes(monkeypatch, variable, text, field, value):
    monkeypatch.setenv(settings.PREFIX + variable, text)
    config, complaints = settings.read()
    assert getattr(config, field) == value
    assert not complaints


@pytest.mark.parametrize(
    "text", ["nonsense", "-1", "1.5", "fp8,nonsense", ",", "0x1", "1e3", "65537", "\N{PILE OF POO}"]
)
@pytest.mark.parametrize("variable", NAMES)
def test_nonsense_is_named_and_the_default_used(monkeypatch, variable, text):
    default, _ = settings.read()
    monkeypatch.setenv(variable, text)
    config, complaints = settings.read()
    assert config == default
    assert len(complaints) == 1
    assert variable in complaints[0] and repr(text) in complaints[0]


@pytest.mark.parametrize("variable", NAMES)
def test_empty_is_unset(monkeypatch, variable):
    default = settings.read()
    monkeypatch.setenv(variable, "  ")
    assert settings.read() == default


def test_an_unknown_variable_is_named(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WSFIX_WORKSPACE", "64")
    config, complaints = settings.read()
    assert config.workspace_bytes == 40 << 20
    assert len(complaints) == 1 and complaints[0].startswith("FLASHINFER_WSFIX_WORKSPACE ")


def test_defaults_are_written_as_one_would_write_them(monkeypatch):
    default = settings.read()
    for setting in settings.SETTINGS.values():
        monkeypatch.setenv(setting.variable, setting.default)
    assert settings.read() == default


@fresh.process
def test_lanes_have_their_default_before_the_settings_are_read():
    from flashinfer_wsfix import state

    assert state.first_bytes == settings.read()[0].workspace_bytes == 40 << 20
