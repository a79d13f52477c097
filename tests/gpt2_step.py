"""The matrix products of a GPT-2 training step."""


def gpt2_step(tokens, layers=12, width=768, vocabulary=50304):
    """(M, K, N, calls) of every product of a step: forward, dX and dW of each weight.

    The defaults are GPT-2 124M with llm.c's padded vocabulary: 147 calls.
    """
    shapes = []
    for k, n, calls in [
        (width, 3 * width, layers),
        (width, width, layers),
        (width, 4 * width, layers),
        (4 * width, width, layers),
        (width, vocabulary, 1),
    ]:
        shapes += [(tokens, k, n, calls), (tokens, n, k, calls), (k, tokens, n, calls)]
    return shapes
