"""Values that several examples of requests and answers share."""

QUESTION = [{"role": "user", "content": "What is a scheduler?"}]
READ = {"prompt_tokens": 9, "total_tokens": 9}
RID = "frontend-0-0123456789abcdefghijklmn"
CREATED = 1767225600
