# ruff: noqa: RUF001 (the marks of DeepSeek are written with such signs)
"""Chat templates after public ones, each with the marks that its tokenizer has as single tokens.

Shortened to what decides where texts of a conversation go, and what is looked for in them.
"""

from dataclasses import dataclass

_SPLIT = (  # Qwen3 and GLM take the thoughts out of an answer's text
    "{% set thoughts = m.reasoning_content or '' %}{% set content = m.content %}"
    "{% if not thoughts and '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    source: str
    marks: tuple[str, ...]


TEMPLATES = {
    "ChatML (Qwen3)": ChatTemplate(
        "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}"
        "</tools> within <tool_call></tool_call><|im_end|>\n{% endif %}"
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not "
        "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + _SPLIT
        + "<|im_start|>assistant\n{% if loop.index0 > ns.last and thoughts %}<think>\n"
        "{{ thoughts.strip('\\n') }}\n</think>\n\n{% endif %}{{ content }}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
        "</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
         "<tool_response>", "</tool_response>"),
    ),
    "Llama 3": ChatTemplate(
        "<|begin_of_text|>{% for m in messages %}{% if m.tool_calls %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% for c in m.tool_calls %}"
        "<|python_tag|>{{ c.function.name }}.call({% for k, v in c.function.arguments | items %}"
        '{{ k }}="{{ v }}"{% endfor %}){% endfor %}<|eom_id|>'
        "{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|eom_id|>", "<|python_tag|>"),
    ),
    "Gemma": ChatTemplate(
        "<bos>{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "Mistral": ChatTemplate(
        "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}"
        "[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
        "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
         "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
    ),
    "DeepSeek": ChatTemplate(
        "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>"
        "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
        "{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜>{{ c.function.name }}\n"
        "{{ c.function.arguments | tojson }}<｜tool▁calls▁end｜>{% endfor %}<｜end▁of▁sentence｜>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
         "<think>", "</think>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "GLM": ChatTemplate(
        "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
        "{{ '/nothink' if not enable_thinking and not m.content.endswith('/nothink') else '' }}"
        "{% elif m.role == 'assistant' %}<|assistant|>"
        + _SPLIT
        + "\n<think>{{ thoughts.strip() }}</think>\n{{ content.strip() }}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
        "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n"
        "</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n<think></think>{% endif %}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>",
         "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
    ),
    "harmony (gpt-oss)": ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if '<|channel|>final<|message|>' in m.content %}"
        "{{ raise_exception('channel tags in the content') }}{% endif %}"
        "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
        "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>"
        "{% endfor %}{% if m.content %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}<|end|>{% endif %}"
        "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary"
        "<|message|>{{ m.content | tojson }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    ),
    # Puts its marks together, so that its source has none of them.
    "Phi": ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
        "<{{ k }}>{{ v }}</{{ k }}>{% endfor %}{% endfor %}"
        "{{ '<|' ~ 'end' ~ '|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|' + 'assistant' + '|>' }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    ),
}  # fmt: skip
