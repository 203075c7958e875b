package e2e

import (
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
)

// BenchmarkZooKeeperChange measures, for one changed instance among many, the
// time from the write to ZooKeeper to its arrival at a client of ZooKeeper that
// watches what changes and reads it again, and at a delta sink of Isthmus, in
// the same run: for a provider of an interface of Dubbo, whose node is replaced
// by another, and for an instance of Spring Cloud, whose data is another.
//
//	go test ./test/e2e -run '^$' -bench ZooKeeperChange -benchtime 300x
func BenchmarkZooKeeperChange(b *testing.B) {
	for _, services := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("dubbo/services=%d", services), func(b *testing.B) { benchmarkZooKeeperDubbo(b, services) })
		b.Run(fmt.Sprintf("spring/services=%d", services), func(b *testing.B) { benchmarkZooKeeperSpring(b, services) })
	}
}

const (
	// zooKeeperEach is how many instances a service has.
	zooKeeperEach = 10
	// zooKeeperChanging is how many services change: a bare client watches
	// these alone.
	zooKeeperChanging = 50
)

func benchmarkZooKeeperDubbo(b *testing.B, services int) {
	server := testzookeeper.Start(b, testzookeeper.Config{})
	parent := func(s int) string { return fmt.Sprintf("/dubbo/org.example.App%d/providers", s) }
	provider := func(s, i, change int) string {
		return parent(s) + "/" + url.QueryEscape(fmt.Sprintf("dubbo://10.%d.%d.%d:20880/org.example.App%d?application=app-%d&interface=org.example.App%d&methods=greet&side=provider&timestamp=%d",
			s/250, s%250, i+1, s, s, s, change))
	}
	server.Load(b, services, func(s int) map[string]string {
		nodes := map[string]string{}
		for i := range zooKeeperEach {
			nodes[provider(s, i, 0)] = ""
		}
		return nodes
	})
	last := make([]int, zooKeeperChanging)
	measureZooKeeper(b, server, services, func(client *zk.Conn, s int) (string, <-chan zk.Event, error) {
		names, _, events, err := client.ChildrenW(parent(s))
		slices.Sort(names)
		return fmt.Sprint(names), events, err
	}, func(s, n int) {
		all := []any{&zk.DeleteRequest{Path: provider(s, 0, last[s]), Version: -1}, &zk.CreateRequest{Path: provider(s, 0, n), Acl: zk.WorldACL(zk.PermAll)}}
		if _, err := server.Client.Multi(all...); err != nil {
			b.Fatal(err)
		}
		last[s] = n
	})
}

func benchmarkZooKeeperSpring(b *testing.B, services int) {
	server := testzookeeper.Start(b, testzookeeper.Config{})
	path := func(s, i int) string { return fmt.Sprintf("/services/app-%d/app-%d-%d", s, s, i) }
	data := func(s, i, change int) string {
		return fmt.Sprintf(`{"name":"app-%d","id":"app-%d-%d","address":"10.%d.%d.%d","port":8080,"payload":{"metadata":{"instance_status":"UP","change":"%d"}}}`,
			s, s, i, s/250, s%250, i+1, change)
	}
	server.Load(b, services, func(s int) map[string]string {
		nodes := map[string]string{}
		for i := range zooKeeperEach {
			nodes[path(s, i)] = data(s, i, 0)
		}
		return nodes
	})
	measureZooKeeper(b, server, services, func(client *zk.Conn, s int) (string, <-chan zk.Event, error) {
		b, _, events, err := client.GetW(path(s, 0))
		return string(b), events, err
	}, func(s, n int) { server.Put(b, path(s, 0), data(s, 0, n)) })
}

// measureZooKeeper measures changes. watched reads what changes of a service,
// and watches it; change makes the nth change.
func measureZooKeeper(b *testing.B, server *testzookeeper.Server, services int, watched func(client *zk.Conn, s int) (string, <-chan zk.Event, error), change func(s, n int)) {
	b.Helper()
	begin := time.Now()
	isthmus := testisthmus.Start(b, fmt.Sprintf("- {name: zookeeper, type: zookeeper, config: {servers: [%q]}}", server.Addr))
	isthmus.WaitReady(b)
	b.Logf("isthmus ready after %v", time.Since(begin).Round(100*time.Millisecond))
	bare := func() <-chan time.Time {
		client, arrived := server.Connect(b), make(chan time.Time, zooKeeperChanging)
		for s := range zooKeeperChanging {
			was, events, err := watched(client, s)
			if err != nil {
				b.Fatal(err)
			}
			// Ends with the client.
			go func() {
				for {
					<-events
					now, next, err := watched(client, s)
					if err != nil {
						return
					}
					if now != was {
						arrived <- time.Now()
					}
					was, events = now, next
				}
			}()
		}
		return arrived
	}
	testisthmus.MeasureChanges(b, func(n int) { change(n%zooKeeperChanging, n) }, bare(), bare(), isthmus.Arrivals(b, services*zooKeeperEach))
}
