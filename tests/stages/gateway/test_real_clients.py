"""Real agent clients, headless, against the gateway with a scripted engine: they finish an edit, and what was sampled is what would be
trained. Install them with tests/resources/install_clients.sh.
"""

import json
import os
from itertools import chain
from pathlib import Path

import anyio
import pytest
from gateway_fakes import IM_END, TOKENIZER, FakeEngine, house, served

from stages.rewards.forest import build_rows

pytestmark = [pytest.mark.resources, pytest.mark.timeout(300)]
CLIENTS = Path(os.environ.get("HEADRACE_CACHE", Path.home() / ".cache" / "headrace")) / "clients"


def installed(path: str) -> str:
    """A client's executable; without it the test is skipped on a laptop and fails in CI."""
    found = CLIENTS / path
    if not found.exists():
        message = f"{found} is missing: run tests/resources/install_clients.sh"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return str(found)


def workspace(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return work


async def run(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    """A client's output; it must end well."""
    home = cwd.parent / "home"
    home.mkdir(exist_ok=True)
    whole = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", **env}
    with anyio.fail_after(240):
        done = await anyio.run_process(command, cwd=cwd, env=whole, check=False, stdin=None, input=b"")
    out = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, out[-4000:]
    return out


def call(name: str, **arguments: object) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def assert_trained_as_sampled(home, session: str, answers: list[str], num_chains: int = 1) -> None:
    """Each scripted answer stands on the log as it was sampled, in rows that train exactly those tokens."""
    records = home.recorder.interactions(session)
    tokens = dict(enumerate(await home.tokens(session)))
    sampled = [tokens[one.ordinal].completion_ids.as_numpy().tolist() for one in records]
    assert sampled == [[*TOKENIZER.encode(answer).tolist(), IM_END] for answer in answers]
    rows = build_rows(records, tokens)
    assert len(rows) == num_chains
    trained = [row.token_ids[row.loss_mask].tolist() for row in rows]
    assert list(chain.from_iterable(trained)) == list(chain.from_iterable(sampled))
    for record, request in zip(records, home.engine.requests, strict=True):
        whole = await home.chain(session, record.ordinal)
        assert whole[: request.prompt_ids.size] == request.prompt_ids.tolist()


async def test_claude_code_finishes_an_edit(tmp_path):
    binary = installed("claude-code/node_modules/.bin/claude")
    work = workspace(tmp_path)
    answers = [
        "<think>\nLook first.\n</think>\n\nI'll read it." + call("Read", file_path=str(work / "calc.py"), limit="20"),
        call("Edit", old_string="    return a - b", file_path=str(work / "calc.py"), new_string="    return a + b")
        + call("Bash", command=f"cd {work} && cat calc.py", description="show"),
        "Fixed: add now adds.",
    ]
    home = house(FakeEngine(answers), context_length=400_000)
    ticket = await home.gateway.open_session("cc")
    async with served(home) as url:
        env = {
            "IS_SANDBOX": "1",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": ticket.token,
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        command = [
            binary,
            "-p",
            "Fix calc.py add",
            "--model",
            "policy",
            "--output-format",
            "json",
            "--dangerously-skip-permissions",
        ]
        out = await run(command, work, env)
    assert "Fixed: add now adds." in out
    assert "a + b" in (work / "calc.py").read_text()
    await assert_trained_as_sampled(home, "cc", answers)


async def test_claude_code_stops_when_its_session_is_over(tmp_path):
    binary = installed("claude-code/node_modules/.bin/claude")
    work = workspace(tmp_path)
    home = house(FakeEngine(["never"]))
    ticket = await home.gateway.open_session("cc")
    await home.gateway.close_session("cc")
    async with served(home) as url:
        env = {"IS_SANDBOX": "1", "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": ticket.token, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}  # fmt: skip
        with pytest.raises(AssertionError, match="410"):
            await run([binary, "-p", "x", "--model", "policy", "--dangerously-skip-permissions"], work, env)
    assert home.engine.requests == []
    assert home.gateway.sessions.late_calls <= 2


def codex_config(folder: Path, url: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        'model = "policy"\nmodel_provider = "gw"\nweb_search = "disabled"\n'
        f'[model_providers.gw]\nname = "gw"\nbase_url = "{url}/v1"\nenv_key = "GW_KEY"\nwire_api = "responses"\n'
    )


async def test_codex_finishes_an_edit(tmp_path):
    binary = installed("codex/node_modules/.bin/codex")
    work = workspace(tmp_path)
    answers = [
        "<think>\nLook first.\n</think>\n\nReading." + call("exec_command", cmd="cat calc.py"),
        call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py") + call("exec_command", cmd="cat calc.py"),
        "Fixed: add now adds.",
    ]
    home = house(FakeEngine(answers), context_length=400_000)
    ticket = await home.gateway.open_session("cx")
    async with served(home) as url:
        codex_config(tmp_path / "home" / ".codex", url)
        command = [
            binary,
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "Fix calc.py add",
        ]
        (tmp_path / "home").mkdir(exist_ok=True)
        out = await run(command, work, {"GW_KEY": ticket.token})
    assert "Fixed: add now adds." in out
    assert "a + b" in (work / "calc.py").read_text()
    await assert_trained_as_sampled(home, "cx", answers)


async def test_codex_stops_when_its_session_is_over(tmp_path):
    binary = installed("codex/node_modules/.bin/codex")
    work = workspace(tmp_path)
    home = house(FakeEngine(["never"]))
    ticket = await home.gateway.open_session("cx")
    await home.gateway.close_session("cx")
    async with served(home) as url:
        codex_config(tmp_path / "home" / ".codex", url)
        command = [binary, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "x"]
        with pytest.raises(AssertionError, match="session cx has ended"):
            await run(command, work, {"GW_KEY": ticket.token})
    assert home.engine.requests == []
    assert home.gateway.sessions.late_calls == 1


async def test_mini_swe_agent_finishes_an_edit(tmp_path):
    binary = installed("mini/bin/mini")
    work = workspace(tmp_path)
    answers = [
        "THOUGHT: read it." + call("bash", command="cat calc.py"),
        "THOUGHT: fix it."
        + call("bash", command="sed -i 's/a - b/a + b/' calc.py")
        + call("bash", command="cat calc.py"),
        "Done." + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    home = house(FakeEngine(answers))
    ticket = await home.gateway.open_session("mini")
    async with served(home) as url:
        env = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": ticket.token,
        }
        await run(
            [binary, "-y", "--exit-immediately", "-m", "openai/policy", "-t", "Fix calc.py add", "-o", "out.json"],
            work,
            env,
        )
    assert "a + b" in (work / "calc.py").read_text()
    await assert_trained_as_sampled(home, "mini", answers)


LITELLM_CLIENT = """
import litellm, sys
kwargs = dict(model="openai/policy", api_base=sys.argv[1] + "/v1", api_key=sys.argv[2])
messages = [{"role": "user", "content": "hi"}]
text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=messages, stream=True, **kwargs))
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
print(text, litellm.completion(messages=messages, **kwargs).choices[0].message.content)
"""


async def test_litellm_as_a_client_streams_and_goes_on(tmp_path):
    python = installed("mini/bin/python")
    work = workspace(tmp_path)
    home = house(FakeEngine(["Hello.", "Bye."]))
    ticket = await home.gateway.open_session("ll")
    async with served(home) as url:
        out = await run(
            [python, "-c", LITELLM_CLIENT, url, ticket.token], work, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        )
    assert "Hello. Bye." in out
    await assert_trained_as_sampled(home, "ll", ["Hello.", "Bye."])
