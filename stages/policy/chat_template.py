"""The chat template of the tiny policy: ChatML with tools, tool calls and tool results.

Rendering is prefix-stable: the text of a conversation is a prefix of the text of any longer one, so a session's next
prompt extends the tokens that were sampled before.
"""

from typing import Final

CHAT_TEMPLATE: Final = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is not none -%}{%- for part in content -%}{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}\
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = 1 if messages and messages[0].role == 'system' else 0 -%}
{%- if first or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if first -%}{{- text_of(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{{- ('\\n\\n' if first else '') + 'Tools you may call, one JSON schema a line:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- 'To call one, answer <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>tool\\n' + text_of(message.content) + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + text_of(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{{- '<tool_call>{"name": ' + function.name | tojson + ', "arguments": ' -}}
{{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
