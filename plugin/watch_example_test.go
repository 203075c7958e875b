package plugin_test

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// The adapter of docs/writing-an-adapter.md, with a registry in memory.
type adapter struct{ registry changes }

// changes is a registry that has one service, then changes, then an end.
type changes struct {
	all []change
	err error
}

type change struct {
	Set     []plugin.Snapshot
	Removed []registry.Key
}

func (c changes) All() iter.Seq[change] { return slices.Values(c.all) }
func (c changes) Err() error            { return c.err }

var errCompacted = errors.New("compacted")

func (a *adapter) list(context.Context) ([]plugin.Snapshot, int, error) {
	return []plugin.Snapshot{{Service: registry.Service{Key: registry.Key{Name: "first"}}}}, 1, nil
}

func (a *adapter) watch(context.Context, int) (changes, error) { return a.registry, nil }

func (a *adapter) follow(ctx context.Context, take func(plugin.Listing)) error {
	services, revision, err := a.list(ctx)
	if err != nil {
		return err // an outage: nothing is removed
	}
	changes, err := a.watch(ctx, revision)
	if err != nil {
		return err
	}
	take(plugin.Listing{Complete: true, Services: services})
	for c := range changes.All() {
		take(plugin.Listing{Services: c.Set, Removed: c.Removed}) // zero: heard, no change
	}
	if errors.Is(changes.Err(), errCompacted) {
		return nil // list again; nothing was lost, so that is no outage
	}
	return changes.Err()
}

func TestFollowOfThePage(t *testing.T) {
	named := func(name string) plugin.Snapshot {
		return plugin.Snapshot{Service: registry.Service{Key: registry.Key{Name: name}}}
	}
	a := &adapter{changes{all: []change{{Set: []plugin.Snapshot{named("second")}}, {Removed: []registry.Key{{Name: "first"}}}}, err: errCompacted}}
	held := map[string]bool{}
	take := func(l plugin.Listing) {
		if l.Complete {
			clear(held)
		}
		for _, s := range l.Services {
			held[s.Service.Key.Name] = true
		}
		for _, k := range l.Removed {
			delete(held, k.Name)
		}
	}
	if err := a.follow(t.Context(), take); err != nil || !maps.Equal(held, map[string]bool{"second": true}) {
		t.Errorf("after what was compacted: %v, %v", held, err)
	}
	a.registry.err = errors.New("cut")
	if err := a.follow(t.Context(), take); err == nil {
		t.Error("a cut connection is no outage")
	}
}
