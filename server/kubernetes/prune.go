package kubernetes

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"
)

// shardLease is what the name of the Lease of a shard ends in.
var shardLease = regexp.MustCompile(`^-[0-9].*-of-[0-9]+$`)

// Leftover is an object of a consumer, on an API server.
type Leftover struct {
	Consumer, Kind, Namespace, Name string
	// Foreign is why it is left alone, "" unless it is.
	Foreign string

	api          dynamic.ResourceInterface
	uid, version string
}

// Pruner removes the objects of consumers that are no more.
type Pruner struct {
	client dynamic.Interface
	// Close ends idle connections.
	Close func()
}

// NewPruner returns a pruner for the API server of a kubeconfig, "" for that of
// the pod. There is no request yet.
func NewPruner(kubeconfig string) (*Pruner, error) {
	client, closeIdle, _, err := connect(kubeconfig)
	if err != nil {
		return nil, err
	}
	return &Pruner{client, closeIdle}, nil
}

// List returns the objects of all consumers, of all bridges, sorted.
func (p *Pruner) List(ctx context.Context) (all []Leftover, err error) {
	for _, k := range allKinds {
		var found []unstructured.Unstructured
		err := listed(ctx, p.client.Resource(k.GroupVersionResource), ConsumerLabel, &found)
		if apierrors.IsNotFound(err) {
			continue // the kind is not installed
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", k.Resource, err)
		}
		for i := range found {
			all = append(all, leftover(p.client.Resource(k.GroupVersionResource).Namespace(found[i].GetNamespace()), &found[i]))
		}
	}
	slices.SortFunc(all, func(a, b Leftover) int {
		return cmp.Or(strings.Compare(a.Consumer, b.Consumer), strings.Compare(a.Kind, b.Kind), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return all, nil
}

func leftover(api dynamic.ResourceInterface, u *unstructured.Unstructured) Leftover {
	l := Leftover{
		Consumer: u.GetLabels()[ConsumerLabel], Kind: u.GetKind(), Namespace: u.GetNamespace(), Name: u.GetName(),
		api: api, uid: string(u.GetUID()), version: u.GetResourceVersion(),
	}
	if !slices.ContainsFunc(u.GetManagedFields(), func(f metav1.ManagedFieldsEntry) bool {
		return f.Manager == fieldManager && f.Operation == metav1.ManagedFieldsOperationApply
	}) {
		l.Foreign = "no bridge has written it (field manager " + fieldManager + ")"
	}
	return l
}

// Under calls f while no bridge can write the objects of a consumer: the
// process holds its Leases, which are removed afterwards. The error is that of
// f, or that a bridge writes them.
func (p *Pruner) Under(ctx context.Context, consumer string, f func(context.Context) error) error {
	found, err := p.client.Resource(leases).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	own := slices.DeleteFunc(found.Items, func(u unstructured.Unstructured) bool {
		shard, ok := strings.CutPrefix(u.GetName(), leaseOf(consumer))
		return !ok || shard != "" && !shardLease.MatchString(shard)
	})
	return p.under(klog.NewContext(ctx, klog.Logger{}), own, f)
}

func (p *Pruner) under(ctx context.Context, own []unstructured.Unstructured, f func(context.Context) error) (err error) {
	if len(own) == 0 {
		return f(ctx)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	api, name := p.client.Resource(leases).Namespace(own[0].GetNamespace()), own[0].GetName()
	var holder, first string
	var fault error
	l := &lease{api: api, name: name, identity: "prune_" + crand.Text()[:8]}
	l.told = func(h string, err error) {
		holder, fault = h, err
		if first = cmp.Or(first, l.seen); h != "" && h != l.identity && l.seen != first {
			cancel() // it is renewed
		}
	}
	late := time.AfterFunc(leaseTime+2*leaseEvery, cancel)
	held := false
	l.run(ctx, func(ctx context.Context) {
		defer cancel()
		if held = late.Stop(); held {
			err = p.under(ctx, own[1:], f)
		}
	})
	switch {
	case held:
		if err == nil {
			err = api.Delete(context.WithoutCancel(ctx), name, metav1.DeleteOptions{})
		}
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return err
	case fault != nil:
		return fmt.Errorf("take the Lease %s/%s: %w", own[0].GetNamespace(), name, fault)
	}
	return fmt.Errorf("%s holds the Lease %s/%s and writes these objects: remove the consumer from its configuration first", cmp.Or(holder, "a bridge"), own[0].GetNamespace(), name)
}

// Remove removes an object if it is still the consumer's.
func (l *Leftover) Remove(ctx context.Context) error {
	for range 5 { // others may write its status
		err := l.api.Delete(ctx, l.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: new(types.UID(l.uid)), ResourceVersion: &l.version}})
		if err == nil || apierrors.IsNotFound(err) {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return err
		}
		u, err := l.api.Get(ctx, l.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		now := leftover(l.api, u)
		if now.uid != l.uid || now.Consumer != l.Consumer || now.Foreign != "" {
			return errors.New("it is another's by now")
		}
		l.version = now.version
	}
	return errors.New("it changes all the time")
}
