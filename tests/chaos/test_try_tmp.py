import pytest, os
from tests.chaos import test_chaos as t
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
K=int(os.environ.get("KILLS","20")); R=int(os.environ.get("RANKS","1")); ST=int(os.environ.get("STEPS","40")); SL=int(os.environ.get("SLOTS","8"))
F=os.environ.get("FLAGS")
@pytest.mark.timeout(3000)
def test_mid(tmp_path):
    t.test_clients_of_a_service_under_fire_notice_nothing_but_time(tmp_path, t.Case(ranks=R, steps=ST, kills=K, slots=SL, options=t.FLAGS if F else t.BF16, parts=frozenset({"weight"}) if F else t.ALL_PARTS))
