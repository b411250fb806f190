#!/usr/bin/env bash
# Install the agent clients that `pytest -m resources` drives (gateway, Arena, verifiers environments), outside the clone.
# Idempotent; folder: $HEADRACE_CACHE (default ~/.cache/headrace), sub-folder clients/. Needs npm and python3.
# With --competitors also the servers that `headrace bench gateway` compares with.
set -euo pipefail

CLIENTS="${HEADRACE_CACHE:-$HOME/.cache/headrace}/clients"
CLAUDE_CODE=2.1.332
CODEX=0.171.0
MINI_SWE_AGENT=2.4.6
LITELLM=1.110.2
VERIFIERS=0.4.0
LITELLM_PROXY=1.99.4 # the newest whose proxy extra installs from the index alone
RLLM_GATEWAY=0.1.0
SMG=1.13.0

mkdir -p "$CLIENTS"

done_already() { [ -f "$CLIENTS/$1.done" ] && [ "$(cat "$CLIENTS/$1.done")" = "$2" ]; }
mark() { printf '%s' "$2" >"$CLIENTS/$1.done"; }

npm_client() { # folder, package@version
  done_already "$1" "$2" && return
  mkdir -p "$CLIENTS/$1"
  npm install --prefix "$CLIENTS/$1" --no-audit --no-fund --loglevel=error "$2"
  # npm does not run postinstall scripts; this one puts the native binary in its place.
  if [ -f "$CLIENTS/$1/node_modules/@anthropic-ai/claude-code/install.cjs" ]; then
    (cd "$CLIENTS/$1/node_modules/@anthropic-ai/claude-code" && node install.cjs)
  fi
  mark "$1" "$2"
}

venv_client() { # folder, packages...
  local folder="$1"
  shift
  done_already "$folder" "$*" && return
  python3 -m venv "$CLIENTS/$folder"
  "$CLIENTS/$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
  mark "$folder" "$*"
}

npm_client claude-code "@anthropic-ai/claude-code@$CLAUDE_CODE"
npm_client codex "@openai/codex@$CODEX"
venv_client mini "mini-swe-agent==$MINI_SWE_AGENT" "litellm==$LITELLM"
venv_client verifiers "verifiers==$VERIFIERS"

if [ "${1:-}" = "--competitors" ]; then
  venv_client litellm-proxy "litellm[proxy]==$LITELLM_PROXY"
  venv_client rllm-gateway "rllm-model-gateway==$RLLM_GATEWAY"
  venv_client smg "smg==$SMG"
fi
echo "clients are in $CLIENTS"
