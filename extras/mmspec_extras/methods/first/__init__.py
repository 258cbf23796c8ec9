"""FiRST (2410.12513): routers choose the layers of a sequence from its prompt; the chosen layers draft."""

from mmspec.plugins import Head, Method

METHOD = Method(
    "first",
    "drafts with the layers of the target that trained routers choose for each prompt",
    "2410.12513",
    drafter="mmspec_extras.methods.first.drafter:RoutedLayersDrafter",
    head=Head(
        model="mmspec_extras.methods.first.head:RoutedLayers",
        loss="mmspec_extras.methods.first.loss:RoutedLayersLoss",
    ),
    needs="routers that were trained for the target",
)
