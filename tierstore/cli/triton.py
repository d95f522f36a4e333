"""`tierstore triton-model`: a model's folder in a Triton model repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, ModelName, Url, argument, option
from tierstore.cli.target import open_target, say, service_url

if TYPE_CHECKING:
    from tierstore.triton.repository import Ports

HostBudget = Annotated[
    str | None, option("SIZE", "CPU memory for cached rows where Triton opens the data directory, such as 4GiB.")
]
DeviceBudget = Annotated[
    str | None,
    option("SIZE", "A GPU's memory for cached rows where Triton opens the data directory: answers stay there."),
]
Batch = Annotated[
    int,
    typer.Option(
        "--max-batch-size", metavar="N", min=0, help="Have Triton gather requests of up to N items; 0: one by one."
    ),
]
Instances = Annotated[int, typer.Option("--instances", metavar="N", min=1, help="Processes that answer.")]


def triton_model(
    model: ModelName,
    out: Annotated[
        Path, argument("OUT", "The folder to make in a model repository; its name is the model's in Triton.")
    ],
    data: Data = None,
    url: Url = None,
    scores: Annotated[bool, typer.Option("--scores", help="What the dense part gives, in place of rows.")] = False,
    max_batch_size: Batch = 0,
    instances: Instances = 1,
    host_budget: HostBudget = None,
    device_budget: DeviceBudget = None,
    json: AsJson = False,
) -> None:
    """Write a model of Triton's Python backend.

    It answers what the model serves: from the data directory, which it opens or finds open,
    or from the service at --url.
    """
    from tierstore.triton.repository import ports_of

    with open_target(data, url) as target:
        ports = ports_of(_metadata(target, model), scores=scores, batches=max_batch_size > 0)
    parameters = source_parameters(model, data, url, host_budget=host_budget, device_budget=device_budget)
    write_model(out, ports, parameters, max_batch_size, instances, joins=max_batch_size > 0)
    names = {"inputs": [port.name for port in ports[0]], "outputs": [port.name for port in ports[1]]}
    say(json, {"model": model, "folder": str(out), **names}, f"{out} answers {', '.join(names['outputs'])} of {model}")


def _metadata(target: Any, model: str) -> dict[str, Any]:
    from tierstore.client import Client

    if isinstance(target, Client):
        return target.model(model).metadata()
    from tierstore.service.dataplane.inference import DataPlane
    from tierstore.service.protocols.oip.documents import model_metadata

    return model_metadata(DataPlane(target, max_response=0), model, None)


def source_parameters(model: str, data: Path | None, url: str | None, **budgets: str | None) -> dict[str, str]:
    """The parameters that tell the model where its answers come from, with settings of a store that are not None."""
    from tierstore.config import load_settings

    if (service := service_url(data, url)) is not None:
        for name in (name for name, budget in budgets.items() if budget is not None):
            shown = name.replace("_", "-")
            raise typer.BadParameter(f"--{shown}: expected no --url with it, as the service has a budget of its own")
        return {"model": model, "url": service}
    place = str(load_settings(data=data).data.absolute())
    return {"model": model, "data": place} | {name: budget for name, budget in budgets.items() if budget is not None}


def write_model(
    folder: Path, ports: Ports, parameters: dict[str, str], max_batch_size: int, instances: int, *, joins: bool
) -> None:
    from tierstore.triton.repository import config_text, write_folder

    config = config_text(ports, parameters, max_batch_size=max_batch_size, instances=instances, joins=joins)
    write_folder(folder, config)


def write_hps(folder: Path, model: str, data: Path | None, url: str | None, max_batch_size: int) -> None:
    """A model that is asked as HPS's backend is: by `KEYS` and `NUMKEYS`, one request at a time."""
    from tierstore.triton.repository import hps_ports

    parameters = source_parameters(model, data, url)
    write_model(folder, hps_ports(batches=max_batch_size > 0), parameters, max_batch_size, 1, joins=False)
