"""Engines that live in this process, behind the port `InferenceEngine`: the built-in torch one and a scripted one."""
