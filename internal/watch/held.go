package watch

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/metadata"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// heldHeader begins a stream of an Isthmus that holds types: one value for each
// collection and registry, "COLLECTION REGISTRY SINCE".
const heldHeader = "isthmus-held"

// tellHeld waits for what a stream begins with, and prints what is held.
// Whether there is an error is said on receiving.
func (wa *watcher) tellHeld(stream interface {
	Header() (metadata.MD, error)
},
) {
	if md, err := stream.Header(); err == nil {
		wa.printHeld(md)
	}
}

// printHeld prints which types do not come yet and why.
func (wa *watcher) printHeld(md metadata.MD) {
	asked := make([]string, 0, len(wa.o.Types))
	for _, url := range wa.o.Types {
		asked = append(asked, collection.OfTypeURL(url))
	}
	held := make(map[string][]string) // collections by registry and time
	var order []string
	for _, v := range md.Get(heldHeader) {
		coll, by, ok := strings.Cut(v, " ")
		if !ok || wa.o.Protocol != "mcp" && !slices.Contains(asked, coll) {
			continue
		}
		if held[by] == nil {
			order = append(order, by)
		}
		held[by] = append(held[by], coll)
	}
	for _, by := range order {
		registry, since, _ := strings.Cut(by, " ")
		fmt.Fprintf(wa.o.Stderr, "%s: waiting since %s: registry %s has not completed its first listing\n", strings.Join(held[by], ", "), since, registry)
	}
}
