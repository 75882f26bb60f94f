"""Lines of published chat templates that show a model's notations, and the parsers for them."""

from tercet.frontend.parsers.registry import ParserNames

TEMPLATES: dict[str, tuple[str, ParserNames]] = {
    "openai/gpt-oss-20b": (
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }} to=functions. <|call|>",
        ParserNames("gpt_oss", "gpt_oss"),
    ),
    "moonshotai/Kimi-K2-Instruct": (
        "<|im_middle|>{{ '<|tool_calls_section_begin|>' }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        ParserNames(None, "kimi_k2"),
    ),
    "moonshotai/Kimi-K2-Thinking": (
        "<|im_middle|><think>{{ r }}</think><|tool_calls_section_begin|><|tool_call_begin|>",
        ParserNames("kimi_k2", "kimi_k2"),
    ),
    "deepseek-ai/DeepSeek-V3-0324": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name + '\\n' + '```json' + '\\n' }}",
        ParserNames(None, "deepseek_v3"),
    ),
    "deepseek-ai/DeepSeek-R1": (
        "{% if '</think>' in content %} <｜tool▁calls▁begin｜>{{ '```json' }}{{ '<｜Assistant｜><think>\\n' }}",
        ParserNames("deepseek_r1", "deepseek_v3"),
    ),
    "deepseek-ai/DeepSeek-V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ '<｜Assistant｜>' }}{{ '</think>' }}",
        ParserNames("qwen3", "deepseek_v31"),
    ),
    "zai-org/GLM-4.5": (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value> <think></think>",
        ParserNames("qwen3", "glm"),
    ),
    "Qwen/Qwen3-8B": (
        "<tool_call>\\n{\"name\": <function-name>} {% if '</think>' in content %} enable_thinking",
        ParserNames("qwen3", "hermes"),
    ),
    "Qwen/Qwen2.5-7B-Instruct": ('<tool_call>\\n{"name": <function-name>}\\n</tool_call>', ParserNames(None, "hermes")),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>",
        ParserNames(None, "qwen3_coder"),
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        "{%- set think_end_token = '</seed:think>' -%} <seed:think> <seed:tool_call>\\n<function=f>\\n<parameter=p>v",
        ParserNames("seed_oss", "seed_oss"),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": ('{{ "[TOOL_CALLS] [" }}{{ tool_call }}', ParserNames(None, "mistral_array")),
    "mistralai/Magistral-Small-2509": (
        "[THINK]{{ block }}[/THINK] {{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
        ParserNames("mistral", "mistral"),
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        ParserNames(None, "llama_pythonic"),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        ParserNames(None, "llama3_json"),
    ),
    "openai/gpt-oss-120b": ("<|start|>assistant<|channel|>final<|message|>", ParserNames("gpt_oss", "gpt_oss")),
    "MiniMaxAI/MiniMax-M2": (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"{{ n }}\">{{ '</think>' }}<response>",
        ParserNames("qwen3", "minimax_m2"),
    ),
    "deepseek-ai/DeepSeek-V3.2": (
        "{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}function_calls> {{ '</think>' }}",
        ParserNames("qwen3", "deepseek_v32"),
    ),
    "deepseek-ai/DeepSeek-V4-Pro": ("<｜DSML｜tool_calls> {{ '</think>' }}", ParserNames("qwen3", "deepseek_v4")),
    "SGLang's template for deepseek-ai/DeepSeek-V4-Pro": (
        "{{ '<｜DSML｜tool_calls>' }} {{ '<｜Assistant｜><think>' }} {{ '<｜Assistant｜></think>' }}",
        ParserNames("deepseek_r1", "deepseek_v4"),
    ),
    "google/gemma-4-31B-it": (
        "{{- '<|tool_call>call:' + function['name'] + '{' -}} {{- '<|channel>thought\\n<channel|>' -}}",
        ParserNames("gemma4", "gemma4"),
    ),
    "google/functiongemma-270m-it": (
        "{{- '<start_function_call>call:' + function['name'] + '{' -}}",
        ParserNames(None, "functiongemma"),
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        "<|im_start|>{{ role }}\n<|vision_start|><|image_pad|><|vision_end|>{{ text }}<|im_end|>",
        ParserNames(),
    ),
    "google/gemma-3-4b-it": ("<start_of_turn>{{ role }}", ParserNames()),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        "write <|START_THINKING|> followed by a plan. 1. Action: write <|START_ACTION|> followed by a list",
        ParserNames("cohere", "cohere"),
    ),
    "CohereForAI/c4ai-command-r-plus": ("Write 'Action:' followed by a json-formatted list of actions", ParserNames()),
    "ibm-granite/granite-3.3-8b-instruct": (
        "<|start_of_role|>system respond only with <|tool_call|> followed by a JSON list of tools used. "
        "Write your thoughts between <think></think> and write your response between <response></response>",
        ParserNames("granite", "granite"),
    ),
    "ibm-granite/granite-3.2-8b-instruct": (
        "<|start_of_role|> <|tool_call|> Write your thoughts after 'Here is my thought process:' and",
        ParserNames("granite_32", "granite"),
    ),
    "ibm-granite/granite-4.0-micro": (
        "<|start_of_role|>{{ role }} within <tool_call></tool_call> XML tags",
        ParserNames(None, "hermes"),
    ),
    "baidu/ERNIE-4.5-21B-A3B-Thinking": (
        "{{- '\\n</think>\\n\\n' }}{{- '<response>\\n' + content }}<tool_call>",
        ParserNames("granite", "hermes"),
    ),
    "microsoft/Phi-4-mini-instruct": (
        "{{ '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}",
        ParserNames(None, "phi4_mini"),
    ),
    "tencent/Hunyuan-A13B-Instruct": (
        "{{- '<tool_calls>[' }} {{ '<think>\\n</think>' }} {{ '<answer>\\n' }}",
        ParserNames("hunyuan", "hunyuan"),
    ),
    "tiiuae/Falcon-H1-7B-Instruct": (
        "within <tool_call> </tool_call> tags: <tool_call>\\n{'arguments': <args-dict>, 'name': <function-name>}",
        ParserNames(None, "hermes"),
    ),
    "ai21labs/AI21-Jamba-1.5-Mini": ("{{ '<tool_calls>[' }}", ParserNames(None, "hunyuan")),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (
        "{{- '<TOOLCALL>[' -}} {{- '<think></think>' -}}",
        ParserNames("qwen3", "nemotron"),
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>"
        " {%- set enable_thinking = true %} {{- '<|im_start|>assistant\\n<think></think>' }}",
        ParserNames("qwen3", "qwen3_coder"),
    ),
    "internlm/internlm2_5-7b-chat": ("<|action_start|><|plugin|>", ParserNames(None, "internlm")),
    "swiss-ai/Apertus-8B-Instruct-2509": (
        "{%- set inner_token = '<|inner_prefix|>' -%}{%- set tool_calls_token = '<|tools_prefix|>' -%}",
        ParserNames("apertus", "apertus"),
    ),
    "LiquidAI/LFM2.5-8B-A1B": (
        "{{- '<|tool_call_start|>[' -}} {%- if '</think>' in content -%}",
        ParserNames("qwen3", "lfm2"),
    ),
    "LiquidAI/LFM2-1.2B": (
        "List of tools: <|tool_list_start|>[{{ tool }}]<|tool_list_end|>",
        ParserNames(None, "lfm2"),
    ),
    "allenai/Olmo-3-7B-Think": (
        "<functions></functions> <function_calls></function_calls> {{ '<|im_start|>assistant\\n<think>' }}",
        ParserNames("qwen3", "olmo3"),
    ),
    "stepfun-ai/step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"f\"> {{ '</think>' }}",
        ParserNames("qwen3", "step3"),
    ),
    "zai-org/glm-4-9b-chat-hf": (
        "[gMASK]<sop>{{ '# 可用工具' }}<|{{ item['role'] }}|>{{ item['metadata'] }}\\n{{ item['content'] }}",
        ParserNames(None, "glm4"),
    ),
    "zai-org/GLM-4.7-Flash": (
        "[gMASK]<sop><tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></think>",
        ParserNames("qwen3", "glm47"),
    ),
    "zai-org/GLM-4.7": (
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key> </think>",
        ParserNames("qwen3", "glm47"),
    ),
    "LiquidAI/LFM2.5-1.2B-Instruct": (
        "<|im_start|>system List of tools: [{{ tool }}] {%- if '</think>' in content -%}",
        ParserNames("qwen3", "lfm2"),
    ),
    "vLLM's template for microsoft/Phi-4-mini-instruct": (
        'a single JSON list formatted as functools[{"name": [function name]}]',
        ParserNames(None, "phi4_mini"),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        "<tool_call>{\"name\": <function-name>}</tool_call> {{ '<think>\\n\\n</think>\\n' }}",
        ParserNames("qwen3", "hermes"),
    ),
    "microsoft/Phi-4-mini-reasoning": (
        "<|system|> <|tool|>{{ t }}<|/tool|> <think>",
        ParserNames("qwen3", "phi4_mini"),
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("<|start_header_id|>{{ role }}<|end_header_id|>", ParserNames()),
    "NousResearch/Hermes-2-Pro-Llama-3-8B": ("within <tool_call></tool_call> XML tags", ParserNames(None, "hermes")),
    "Qwen/Qwen3.5-27B": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1> {{ '</think>' }}",
        ParserNames("qwen3", "qwen3_coder"),
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("[INST] {{ content }} [/INST]", ParserNames()),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (
        "{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}",
        ParserNames(None, "mistral"),
    ),
    "microsoft/phi-4": ("<|im_start|>user<|im_sep|>{{ content }}<|im_end|>", ParserNames()),
    "microsoft/Phi-4-reasoning": (
        "<|im_start|>system<|im_sep|> <think> {Thought section} </think> {Solution section}",
        ParserNames("qwen3"),
    ),
    "baidu/ERNIE-4.5-0.3B-PT": ("User: {{ content }}Assistant: ", ParserNames()),
    "ibm-granite/granite-3.1-8b-instruct": (
        "<|start_of_role|>system<|end_of_role|> respond only with <|tool_call|> followed by a JSON list of tools used.",
        ParserNames(None, "granite"),
    ),
    "rednote-hilab/dots.llm1.inst": ("<|userprompt|>{{ content }}<|endofuserprompt|><|response|>", ParserNames()),
    "allenai/OLMoE-1B-7B-0924-Instruct": ("<|user|>{{ content }}<|assistant|>", ParserNames()),
    "allenai/Olmo-3-7B-Instruct": (
        "{{ '<functions>' + functions + '</functions>' }}{{ '<function_calls>' + calls + '</function_calls>' }}",
        ParserNames(None, "olmo3"),
    ),
    "deepseek-ai/DeepSeek-V2-Chat": ("User: {{ content }} Assistant:", ParserNames()),
    "Salesforce/Llama-xLAM-2-8b-fc-r": (
        '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]',
        ParserNames(),
    ),
    "a template without tools": ("<|im_start|>{{ role }}", ParserNames(None, None)),
}
