// Command oldest says what Istio 1.8 would reject, the oldest version that
// builds and the last that takes the legacy protocol. Its input and its output
// are those of its neighbour, newest.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gogo/protobuf/proto"
	"github.com/gogo/protobuf/types"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"istio.io/istio/pkg/config"
	"istio.io/istio/pkg/config/schema/gvk"
	"istio.io/istio/pkg/config/validation"
)

// rejected is one line of the output.
type rejected struct {
	Index  int    `json:"index"`
	Reason string `json:"reason"`
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(r io.Reader, w io.Writer) error {
	in, out := bufio.NewReaderSize(r, 1<<20), bufio.NewWriter(w)
	lines := json.NewEncoder(out)
	var size [4]byte
	var buf []byte
	for n := 0; ; n++ {
		if _, err := io.ReadFull(in, size[:]); errors.Is(err, io.EOF) {
			if err := lines.Encode(map[string]int{"read": n}); err != nil {
				return err
			}
			return out.Flush()
		} else if err != nil {
			return fmt.Errorf("resource %d: %w", n, err)
		}
		length := int(binary.BigEndian.Uint32(size[:]))
		if cap(buf) < length {
			buf = make([]byte, length)
		}
		buf = buf[:length]
		if _, err := io.ReadFull(in, buf); err != nil {
			return fmt.Errorf("resource %d: %w", n, err)
		}
		if err := check(buf); err != nil {
			if err := lines.Encode(rejected{n, err.Error()}); err != nil {
				return err
			}
		}
	}
}

// check decodes a resource as Pilot does and validates it.
func check(b []byte) error {
	res := &mcp.Resource{}
	if err := proto.Unmarshal(b, res); err != nil {
		return err
	}
	if res.Metadata == nil || res.Body == nil {
		return errors.New("metadata or body is missing")
	}
	parts := strings.SplitN(res.Metadata.Name, "/", 2)
	if len(parts) != 2 {
		return fmt.Errorf("metadata.name %q is not namespace/name", res.Metadata.Name)
	}
	created, err := types.TimestampFromProto(res.Metadata.CreateTime)
	if err != nil {
		return err
	}
	var body types.DynamicAny
	if err := types.UnmarshalAny(res.Body, &body); err != nil {
		return err
	}
	cfg := config.Config{Spec: body.Message, Meta: config.Meta{
		Name: parts[1], Namespace: parts[0], Labels: res.Metadata.Labels, Annotations: res.Metadata.Annotations, CreationTimestamp: created,
	}}
	switch body.Message.(type) {
	case *networking.ServiceEntry:
		cfg.GroupVersionKind = gvk.ServiceEntry
		_, err = validation.ValidateServiceEntry(cfg)
	case *networking.WorkloadEntry:
		cfg.GroupVersionKind = gvk.WorkloadEntry
		_, err = validation.ValidateWorkloadEntry(cfg)
	case *networking.DestinationRule:
		cfg.GroupVersionKind = gvk.DestinationRule
		_, err = validation.ValidateDestinationRule(cfg)
	default:
		err = fmt.Errorf("%s: nothing validates this kind", res.Body.TypeUrl)
	}
	return err
}
