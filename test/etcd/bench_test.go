package etcd

import (
	"context"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// perService is how many instances a service has.
const perService = 10

func key(service, instance int) string {
	return fmt.Sprintf("/services/svc-%d/svc-%d-%d", service, service, instance)
}

func value(service, instance, change int) string {
	return fmt.Sprintf(`{"address":"10.%d.%d.%d","port":8080,"meta":{"protocol":"http","change":"%d"}}`, 10+instance, service/250, service%250, change)
}

// BenchmarkChange measures, for one changed instance among many, the time from
// the write to etcd to its arrival at a bare watch of etcd's own client and at
// a delta sink of Isthmus, in the same run. It reports medians, and the 99th
// percentile of what Isthmus adds, beside by how much a second bare watch is
// later than the first.
//
//	go test ./test/etcd -run '^$' -bench Change -benchtime 1000x
func BenchmarkChange(b *testing.B) {
	for _, services := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) { benchmarkChange(b, services) })
	}
}

func benchmarkChange(b *testing.B, services int) {
	server := testetcd.Start(b, testetcd.Config{})
	for s := 0; s < services; s += 10 {
		var all []clientv3.Op
		for n := range 10 * perService {
			all = append(all, clientv3.OpPut(key(s+n/perService, n%perService), value(s+n/perService, n%perService, 0)))
		}
		if _, err := server.Client.Txn(b.Context()).Then(all...).Commit(); err != nil {
			b.Fatal(err)
		}
	}
	begin := time.Now()
	isthmus := testisthmus.Start(b, fmt.Sprintf(`- {name: etcd, type: etcd, config: {endpoints: [%q]}}`, server.URL))
	isthmus.WaitReady(b)
	b.Logf("isthmus ready after %v", time.Since(begin).Round(100*time.Millisecond))

	bare, second, delta := watch(b, server), watch(b, server), isthmus.Arrivals(b, services*perService)
	testisthmus.MeasureChanges(b, func(n int) { server.Put(b, key(n%services, 0), value(n%services, 0, n)) }, bare, second, delta)
}

// watch returns when each change arrives at a watch of etcd's own client.
func watch(b *testing.B, server *testetcd.Server) <-chan time.Time {
	b.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{server.URL}})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	events := client.Watch(ctx, "/services/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	<-events
	arrived, done := make(chan time.Time, 16), make(chan struct{})
	go func() {
		defer close(done)
		for m := range events {
			now := time.Now()
			for range m.Events {
				arrived <- now
			}
		}
	}()
	b.Cleanup(func() {
		cancel()
		<-done
		client.Close()
	})
	return arrived
}
