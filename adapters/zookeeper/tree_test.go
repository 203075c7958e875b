package zookeeper

import (
	"fmt"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// shop returns the data of an instance of a Dubbo application with a revision.
func shop(revision string) []byte {
	return fmt.Appendf(nil, `{"address":"10.0.0.1","port":80,"payload":{"metadata":{"dubbo.endpoints":"[{\"port\":1,\"protocol\":\"tri\"}]","dubbo.metadata.revision":%q,"dubbo.metadata.storage-type":"remote"}}}`, revision)
}

// listed returns a tree in which the application shop, which offers the
// interface a, has one instance, whose revision is wanted next.
func listed(t *testing.T, before *tree, revision string) (_ *tree, wanted string) {
	t.Helper()
	tree := newTree(DefaultConfig, func(registry.Key) bool { return true }, before)
	for _, node := range tree.setMappings([]string{"a"}) {
		tree.setMapping(node, []string{"shop"})
	}
	tree.setApps([]string{"shop"})
	tree.setInstances("shop", []string{"1"})
	return tree, tree.setInstance("shop", "1", shop(revision))
}

// count returns the number of instances of a unit.
func count(tree *tree, u unit) (n int) {
	services, _ := tree.compose(u)
	for _, s := range services {
		n += len(s.Instances)
	}
	return n
}

func wantOne(t *testing.T, tree *tree) {
	t.Helper()
	for _, u := range []unit{{app: true, name: "shop"}, {name: "a"}} {
		if n := count(tree, u); n != 1 {
			t.Errorf("%v has %d instances, want 1", u, n)
		}
	}
}

// An instance whose revision may no longer be read stays what it was, also when
// another one of its application comes.
func TestRevisionDenied(t *testing.T) {
	before, wanted := listed(t, nil, "r")
	before.setRevision("shop", wanted, []byte(`{"services":{"a:tri":{"name":"a","group":"g","protocol":"tri","port":1}}}`))
	wantOne(t, before)
	now, wanted := listed(t, before, "r")
	now.keep(place{kind: kindRevision, name: "shop", id: wanted})
	wantOne(t, now)
	services, _ := now.compose(unit{name: "a"})
	if len(services) != 1 || services[0].Service.Key.Group != "g" {
		t.Errorf("the interface became %v", services)
	}
}

// A revision that can be the name of no node is one that the registry does not
// have, and costs no other instance anything.
func TestRevisionOfNoNode(t *testing.T) {
	for _, revision := range []string{"a/b", "/", strings.Repeat("x", 2<<20)} {
		tree, wanted := listed(t, nil, revision)
		if wanted != "" {
			t.Errorf("%.20q is asked for", wanted)
		}
		wantOne(t, tree)
	}
}
