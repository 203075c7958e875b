package kubernetes

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/isthmus-mesh/isthmus/internal/wait"
)

const (
	// leaseTime is how long a lease that nobody renews is its holder's.
	leaseTime = 15 * time.Second
	// renewWithin is how long a holder that cannot renew goes on.
	renewWithin = 10 * time.Second
	// leaseEvery is the time between two attempts to take or renew it.
	leaseEvery = 2 * time.Second
	// leaseWait bounds one attempt.
	leaseWait = 5 * time.Second
)

// lease is a Lease that one of several processes holds. Clocks of machines are
// not compared: a holder is gone once the Lease has not changed for leaseTime.
// Package leaderelection of client-go does the same, and links the client of
// every kind of Kubernetes into each process; it gives a lease back without
// waiting for what was done under it.
type lease struct {
	api      dynamic.ResourceInterface
	name     string
	identity string
	// told is called after each attempt with who holds the lease, or why that
	// is not known.
	told func(holder string, err error)

	seen string    // holder and time of the Lease as last read
	at   time.Time // when that was read first
}

// leaseOf returns the name of the Lease of a consumer.
func leaseOf(consumer string) string { return "isthmus-" + consumer }

// run calls lead whenever the process holds the lease, with a context that ends
// when it does no longer, and waits until lead has returned. It ends with ctx.
func (l *lease) run(ctx context.Context, lead func(context.Context)) {
	for {
		if l.attempt(ctx) {
			l.hold(ctx, lead)
		}
		if !wait.Pause(ctx, leaseEvery+rand.N(leaseEvery/4), nil) {
			return
		}
	}
}

// hold runs lead while the lease is renewed.
func (l *lease) hold(ctx context.Context, lead func(context.Context)) {
	own, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { lead(own) }) // ends with own
	for renewed := time.Now(); wait.Pause(ctx, leaseEvery, nil); {
		if l.attempt(ctx) {
			renewed = time.Now()
		} else if time.Since(renewed) > renewWithin || l.lost() {
			cancel()
			group.Wait()
			return
		}
	}
	cancel()
	group.Wait()
	// Give it back, so that another process need not wait for its end.
	bounded, done := context.WithTimeout(context.WithoutCancel(ctx), leaseWait)
	defer done()
	if o, err := l.api.Get(bounded, l.name, metav1.GetOptions{}); err == nil && field(o, "spec", "holderIdentity") == l.identity {
		_ = unstructured.SetNestedField(o.Object, "", "spec", "holderIdentity")
		_, _ = l.api.Update(bounded, o, metav1.UpdateOptions{}) // it ends by itself otherwise
	}
}

// lost reports whether the Lease, as last read, is another's.
func (l *lease) lost() bool { return !strings.HasPrefix(l.seen, l.identity+" ") }

// attempt takes or renews the lease, and reports whether the process holds it.
func (l *lease) attempt(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, leaseWait)
	defer cancel()
	holder, err := l.try(ctx)
	l.told(holder, err)
	return err == nil && holder == l.identity
}

// try returns who holds the lease after an attempt to take it.
func (l *lease) try(ctx context.Context) (holder string, err error) {
	now := time.Now()
	o, err := l.api.Get(ctx, l.name, metav1.GetOptions{})
	none := apierrors.IsNotFound(err)
	switch {
	case none:
		o = &unstructured.Unstructured{Object: map[string]any{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}}
		o.SetName(l.name)
	case err != nil:
		return "", err
	}
	holder = field(o, "spec", "holderIdentity")
	if seen := holder + " " + field(o, "spec", "renewTime"); seen != l.seen {
		l.seen, l.at = seen, now
	}
	if holder != "" && holder != l.identity && now.Sub(l.at) < leaseTime {
		return holder, nil
	}
	moment := now.UTC().Format(metav1.RFC3339Micro)
	spec := map[string]any{
		"holderIdentity": l.identity, "leaseDurationSeconds": int64(leaseTime / time.Second),
		"renewTime": moment, "acquireTime": field(o, "spec", "acquireTime"),
	}
	if holder != l.identity {
		spec["acquireTime"] = moment
	}
	o.Object["spec"] = spec
	if none {
		_, err = l.api.Create(ctx, o, metav1.CreateOptions{})
	} else {
		_, err = l.api.Update(ctx, o, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return "", nil // another was faster, and is read next
	case err != nil:
		return "", err
	}
	l.seen, l.at = l.identity+" "+moment, now
	return l.identity, nil
}

// field returns a string of an object, "" if there is none.
func field(o *unstructured.Unstructured, path ...string) string {
	s, _, _ := unstructured.NestedString(o.Object, path...)
	return s
}
