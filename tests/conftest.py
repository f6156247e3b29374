"""How hard the drawn tests try."""

from hypothesis import HealthCheck, settings

# A test has no deadline: the first call of a kernel may compile it. The autouse fixtures patch allocators and
# seed the generator, which one patch and one seed for all examples serve as well.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

settings.register_profile("suite", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("fuzz", max_examples=600, print_blob=True, **_COMMON)
settings.load_profile("suite")
