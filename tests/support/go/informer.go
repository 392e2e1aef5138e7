// informer is what a Kubernetes controller has inside: client-go's own shared informer, here on the
// ConfigMaps of one namespace. `informer URL TOKEN NAMESPACE` prints a line of JSON for each list and
// watch that it asks for, for what these end with, for each event that a controller would get, and for
// its store whenever that or the revision it knows is another. It runs until it is killed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientfeatures "k8s.io/client-go/features"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "informer:", err)
		os.Exit(1)
	}
}

type line map[string]any

var printing sync.Mutex

func say(l line) {
	printing.Lock()
	defer printing.Unlock()
	// One write for each line: whoever reads along sees whole lines or none.
	text, err := json.Marshal(l)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(append(text, '\n'))
}

func run(args []string) error {
	if len(args) != 3 {
		return errors.New("usage: informer URL TOKEN NAMESPACE")
	}
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:        args[0],
		BearerToken: args[1],
		// The server makes its own certificate.
		TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		// No limit on requests.
		QPS: -1,
	})
	if err != nil {
		return err
	}
	say(line{
		"what": "start",
		// Whether it asks for lists as watches with initial events.
		"watch_list_client": clientfeatures.FeatureGates().Enabled(clientfeatures.WatchListClient),
	})
	maps := client.CoreV1().ConfigMaps(args[2])
	informer := cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := maps.List(ctx, options)
			said := asked("list", options)
			if err != nil {
				failed(said, err)
			} else {
				said["resource_version"] = list.ResourceVersion
				said["items"] = len(list.Items)
			}
			say(said)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			stream, err := maps.Watch(ctx, options)
			said := asked("watch", options)
			if err != nil {
				failed(said, err)
				say(said)
				return nil, err
			}
			say(said)
			return watch.Filter(stream, func(event watch.Event) (watch.Event, bool) {
				seen(event)
				return event, true
			}), nil
		},
	}, &corev1.ConfigMap{}, 0, cache.Indexers{})
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { changed("added", object) },
		UpdateFunc: func(_, object any) { changed("updated", object) },
		DeleteFunc: func(object any) {
			if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = gone.Obj
			}
			changed("deleted", object)
		},
	})
	if err != nil {
		return err
	}
	go informer.Run(make(chan struct{}))
	var last line
	for synced := false; ; time.Sleep(20 * time.Millisecond) {
		if !synced {
			if synced = handler.HasSynced(); synced {
				say(line{"what": "synced", "resource_version": informer.LastSyncResourceVersion()})
			}
			continue
		}
		objects := line{}
		for _, object := range informer.GetStore().List() {
			one := object.(*corev1.ConfigMap)
			objects[one.Name] = line{"resource_version": one.ResourceVersion, "data": one.Data}
		}
		now := line{
			"what":             "store",
			"resource_version": informer.LastSyncResourceVersion(),
			"objects":          objects,
		}
		if !reflect.DeepEqual(now, last) {
			say(now)
			last = now
		}
	}
}

func asked(what string, options metav1.ListOptions) line {
	return line{
		"what":                what,
		"asked":               options.ResourceVersion,
		"match":               options.ResourceVersionMatch,
		"send_initial_events": options.SendInitialEvents != nil && *options.SendInitialEvents,
	}
}

func failed(said line, err error) {
	said["error"] = err.Error()
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		said["code"] = status.Status().Code
		said["reason"] = status.Status().Reason
	}
}

// What a watch tells of itself, besides the changes.
func seen(event watch.Event) {
	switch event.Type {
	case watch.Error:
		said := line{"what": "watch_error"}
		failed(said, apierrors.FromObject(event.Object))
		say(said)
	case watch.Bookmark:
		object, err := meta.Accessor(event.Object)
		if err != nil {
			panic(err)
		}
		say(line{
			"what":               "bookmark",
			"resource_version":   object.GetResourceVersion(),
			"initial_events_end": object.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true",
		})
	}
}

func changed(what string, object any) {
	one := object.(*corev1.ConfigMap)
	say(line{
		"what":             what,
		"name":             one.Name,
		"resource_version": one.ResourceVersion,
		"data":             one.Data,
	})
}
